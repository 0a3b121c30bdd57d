"""Laws of starting `nrl`: help loads nothing heavy and is quick; errors of users are messages, others tracebacks."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from nemo_rl_like.artifacts.errors import InputError, NrlError, StoppedBySignal
from nemo_rl_like.cli.commands import run
from nemo_rl_like.cli.main import main
from nemo_rl_like.cluster import joined
from nemo_rl_like.spec.loader import load_spec
from tests.cli.command import START, nrl

HEAVY = ("torch", "ray", "transformers", "megatron", "vllm", "kubernetes", "numpy", "rich", "matplotlib")
COMMANDS = (
    "demo",
    "run",
    "validate",
    "schema",
    "eval",
    "chat",
    "export",
    "resume",
    "layout",
    "doctor",
    "explain",
    "pipeline plan",
    "pipeline run",
    "pipeline status",
    "pipeline why",
    "pipeline lineage",
    "env list",
    "model fetch",
    "model check",
)
REPORT_HEAVY = (
    f"import atexit, sys; atexit.register(lambda: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr))"
)
OWN_COMMANDS = """
import time
from nemo_rl_like.artifacts.errors import InputError, StoppedBySignal
from nemo_rl_like.cli.app import app
@app.command()
def wait(): print("waiting", flush=True); time.sleep(60)
@app.command()
def bug(): raise ValueError("a bug")
@app.command()
def bad_input(): raise InputError("`model.path` is 'x'\\nand more")
@app.command()
def stopped(): raise StoppedBySignal("saved")
"""


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_of_every_command_imports_nothing_heavy(command: str) -> None:
    done = nrl(*command.split(), "--help", before=REPORT_HEAVY)
    assert done.returncode == 0
    assert "Usage: nrl" in done.stdout
    assert done.stderr.strip() == "[]"


DEMO = Path(__file__).parents[2] / "configs/demo.yaml"


@pytest.mark.parametrize("command", ["explain", "validate", "pipeline plan"])
def test_what_a_login_node_asks_of_a_spec_imports_nothing_heavy(command: str) -> None:
    done = nrl(*command.split(), str(DEMO), before=REPORT_HEAVY)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_help_takes_less_than_eight_times_an_empty_python() -> None:
    def seconds(code: str, *arguments: str) -> float:
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, check=True, timeout=60)
        return time.monotonic() - started

    pairs = [(seconds("pass"), seconds(START, "--help")) for _ in range(11)]
    ratio = statistics.median(b / a for a, b in pairs)
    assert ratio < 8, f"`nrl --help` takes {ratio:.1f} times `python -c pass`"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [("bad-input", 2, "error: `model.path` is 'x'\nand more"), ("stopped", 75, "error: saved")],
)
def test_an_error_that_users_meet_is_a_message_and_its_exit_code(command: str, code: int, words: str) -> None:
    done = nrl(command, before=OWN_COMMANDS)
    assert done.returncode == code
    assert done.stderr.strip() == words
    assert done.stdout == ""


def test_any_other_error_shows_its_traceback() -> None:
    done = nrl("bug", before=OWN_COMMANDS)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: a bug" in done.stderr


def test_ctrl_c_ends_with_130_and_no_traceback() -> None:
    command = [sys.executable, "-c", f"{OWN_COMMANDS}\n{START}", "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert "Traceback" not in process.stderr.read()


def test_an_unknown_command_is_a_usage_error() -> None:
    done = nrl("trian")
    assert done.returncode == 2
    assert "No such command 'trian'" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "started", "told"),
    [
        (
            NrlError("worker 'policy' died"),
            1,
            True,
            ["error: worker 'policy' died", "next: nrl resume '{}'    # goes on"],
        ),
        (NrlError("the disk is full"), 1, False, ["error: the disk is full"]),
        (InputError("no such file"), 2, True, ["error: no such file"]),
        (StoppedBySignal("saved step 3"), 75, True, ["error: saved step 3", "next: nrl resume '{}'    # goes on"]),
        (KeyboardInterrupt(), 130, True, ["next: nrl resume '{}'    # goes on", "stopped by Ctrl-C"]),
        (KeyboardInterrupt(), 130, False, ["stopped by Ctrl-C"]),
    ],
)
def test_a_run_that_failed_says_what_to_type(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    started: bool,
    told: list[str],
) -> None:
    """In this process, with a pipeline that fails at once."""
    output = tmp_path / "my run"
    output.mkdir()
    monkeypatch.delenv(joined.ENV, raising=False)
    if started:
        (output / "status.json").write_text("{}")

    def fails(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(run, "run_pipeline", fails)
    monkeypatch.setattr(run, "log_to_stderr", lambda: None)
    monkeypatch.setattr(sys, "argv", ["nrl", "run", str(DEMO), f"output={output}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == len(told) and all(map(str.startswith, lines, (text.format(output) for text in told))), lines


def test_what_a_job_runs_leaves_the_next_start_to_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status.json").write_text("{}")
    spec = load_spec(DEMO, [f"output={tmp_path}"])
    monkeypatch.delenv(joined.ENV, raising=False)
    assert run._next(spec) == f"next: nrl resume {tmp_path}    # goes on from what was saved\n"
    monkeypatch.setenv(joined.ENV, "{}")
    assert run._next(spec) == ""
