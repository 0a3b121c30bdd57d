"""Runs `nrl` in a process of its own, as users do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

START = "from nemo_rl_like.cli.main import main; main()"


def nrl(*arguments: str, cwd: Path | None = None, before: str = "") -> subprocess.CompletedProcess[str]:
    """The finished process; `before` is Python that runs in it first."""
    command = [sys.executable, "-c", f"{before}\n{START}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)
