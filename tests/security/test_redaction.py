"""A secret's value is nowhere in what a run writes, however its owner spills it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_like.artifacts import redaction
from nemo_rl_like.artifacts.redaction import RedactingFormatter, redacted, watch
from nemo_rl_like.environment.types import Unscorable
from tests.stages.killing import KILLED, write_sums, write_tiny

SECRET = "s3cr3t-token-abc"
SPILL = """
import logging, os, sys
def reward_func(prompts, responses, labels=None):
    value = os.environ["TOKEN"]
    print(value, file=sys.stderr, flush=True)
    logging.getLogger("mine").warning("token %s", value)
    raise RuntimeError("the server refused " + value)
"""


@pytest.fixture(autouse=True)
def no_secret_is_left_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_watched", {})


def test_watched_values_are_replaced_the_longest_first() -> None:
    watch({"LONG": "abcdefgh", "SHORT": "abcd", "TINY": "a"})
    assert redacted("x abcdefgh abcd a") == "x <secret LONG> <secret SHORT> a"


def test_log_lines_and_tracebacks_hold_none() -> None:
    watch({"TOKEN": SECRET})
    try:
        raise ValueError(f"bad {SECRET}")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "got %s", (SECRET,), sys.exc_info())
    line = RedactingFormatter("%(message)s").format(record)
    assert SECRET not in line and line.count("<secret TOKEN>") == 2


def test_what_an_environment_says_of_a_failure_holds_none() -> None:
    watch({"TOKEN": SECRET})
    error = Unscorable("error", f"refused {SECRET}")
    assert SECRET not in str(error) and SECRET not in error.detail


@pytest.mark.service
@pytest.mark.timeout(300)
def test_a_run_whose_reward_spills_its_secret_writes_it_nowhere(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write_sums(tmp_path)
    (tmp_path / "reward.py").write_text(SPILL)
    text = KILLED.replace("ENGINE", "embedded").replace("STEPS", "2") + "secrets: {TOKEN: {env: MY_TOKEN}}\n"
    spec = write_tiny(output, text, folder=tmp_path)
    env = {**os.environ, "MY_TOKEN": SECRET}
    command = [str(Path(sys.executable).with_name("nrl")), "run", str(spec), "--plain"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1 and "the server refused <secret TOKEN>" in done.stderr, done.stderr[-2000:]
    assert SECRET not in done.stdout + done.stderr
    files = [p for p in output.rglob("*") if p.is_file()]
    assert len(files) > 5 and [str(p) for p in files if SECRET.encode() in p.read_bytes()] == []
