"""Laws of the terminal: plain without a terminal, never steered by what a model says, light to import."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_like.observe.plot import plot_curves
from nemo_rl_like.observe.terminal import Banner, BeforeAfter, Sample, Terminal, printable, rl_batch, sft_batch

EVIL = "\x1b[31m[bold]12[/bold]\r\x07"


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def show_everything(stream: io.StringIO) -> str:
    terminal = Terminal(stream)
    terminal.banner(Banner("demo", {"model.init.layers": "5"}, "2 CPU cores", [rl_batch(8, 4, 2, 1, 10)], "runs/demo"))
    with terminal.progress("rl", 10) as bar:
        for step in range(1, 3):
            bar.advance()
            terminal.metrics(step, 10, {"reward": 0.51234, "timing/step": 1.5})
    terminal.samples("step 2", [Sample("12+30=", EVIL, 1.0, -0.5), Sample("1+1=", "3", None)])
    terminal.before_after([BeforeAfter("2+2=", "5", EVIL, 0.0, 1.0)], "sft", "rl")
    terminal.next_commands([("nrl chat " + "very-long-folder-name/" * 10, "talk to it")])
    return stream.getvalue()


def test_without_a_terminal_no_control_code_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = show_everything(io.StringIO())
    assert "\x1b" not in text and "\r" not in text and "\x07" not in text
    assert text.isascii()


def test_everything_promised_is_there() -> None:
    text = show_everything(io.StringIO())
    for part in ("demo", "model.init.layers", "2 CPU cores", "32 rollouts", "20 in all", "runs/demo"):
        assert part in text
    for part in ("step  1/10  reward 0.5123  timing/step 1.5", "invalid", "-0.5", "sft -> rl"):
        assert part in text


def test_a_command_is_never_broken_over_lines() -> None:
    assert "nrl chat " + "very-long-folder-name/" * 10 in show_everything(io.StringIO())


def test_on_a_terminal_a_response_cannot_send_control_codes() -> None:
    text = show_everything(FakeTerminal())
    assert "\x1b[31m" not in text and "\x07" not in text
    assert "\\x1b[31m[bold]12[/bold]" in text.replace("\n", "")


def test_printable_keeps_text_and_shows_controls() -> None:
    assert printable("caf\u00e9 \u4f60\n") == "caf\u00e9 \u4f60\n"
    assert printable("\x1b\u202e\t") == "\\x1b\\u202e\\t"


def test_batch_arithmetic_of_sft() -> None:
    assert sft_batch(64, 100) == "100 optimizer steps x 64 examples = 6400 examples"


def test_plot_is_a_png(tmp_path: Path) -> None:
    plot_curves(tmp_path / "deep" / "reward.png", {"reward": [(1, 0.1), (2, 0.4)], "eval": [(2, 0.3)]}, title="demo")
    assert (tmp_path / "deep" / "reward.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_curves(tmp_path / "x.png", {"reward": []}, title="demo")


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = "('torch', 'ray', 'transformers', 'matplotlib', 'tensorboard', 'numpy')"
    code = (
        "import sys, nemo_rl_like.observe.terminal, nemo_rl_like.observe.metrics, "
        "nemo_rl_like.observe.timing, nemo_rl_like.observe.plot\n"
        f"sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
