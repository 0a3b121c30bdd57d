"""Runs a scheduler's own commands: words, no shell, a deadline, and their own words when they fail."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from nemo_rl_like.artifacts.errors import SubmitError

TIMEOUT_S = 60.0


def call(
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    text: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """The finished command, whatever its exit code. `text` is its standard input.

    Raises SubmitError when it is not installed or does not end in time.
    """
    try:
        return subprocess.run(
            command,
            env=None if environ is None else dict(environ),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SubmitError(f"`{command[0]}` is not installed on this host; submit from one that has it") from error
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"`{command[0]}` did not answer within {timeout_s:g} s; is the scheduler up?") from error


def output_of(command: Sequence[str], *, environ: Mapping[str, str] | None = None, text: str | None = None) -> str:
    """What the command prints. Raises SubmitError with its words when it fails."""
    done = call(command, environ=environ, text=text)
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip()) or "no words"
        raise SubmitError(f"`{command[0]}` refused (exit code {done.returncode}): {words}")
    return done.stdout
