"""Laws of the banner and of the commands that a run ends with."""

from __future__ import annotations

import shlex
from pathlib import Path

from nemo_rl_like.cli.banner import banner, next_commands
from nemo_rl_like.cli.commands.run import demo_spec
from nemo_rl_like.spec.loader import load_spec, spec_hash
from tests.cli.command import nrl


def test_the_commands_to_type_next_exist_and_name_the_run() -> None:
    folder = Path("runs/my run")
    for command, why in next_commands(folder):
        words = shlex.split(command)
        assert str(folder) in words
        assert why
        assert nrl(words[1], "--help").returncode == 0


def test_the_banner_names_spec_device_batches_and_output_of_the_demo() -> None:
    spec = load_spec(demo_spec(), ["seed=7"])
    shown = banner(spec)
    assert spec_hash(spec)[:12] in shown.spec["spec"] and "seed 7" in shown.spec["spec"]
    assert shown.device.split()[1] in ("cpu", "gpu")
    assert shown.output == spec.output
    assert len(shown.batch) == sum(s.kind in ("sft", "rl") for s in spec.stages)
