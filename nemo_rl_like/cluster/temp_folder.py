"""The folder of a run's temporary files on one host: Ray's own, and what workers and engines leave (vLLM: its sockets). It goes with the run."""

from __future__ import annotations

import tempfile
from pathlib import Path

RAYS = "r"
"""Ray's part of the folder. Ray lets every user write to it; nobody else enters the folder around it."""
LONGEST_ROOT = 24
"""Characters: Ray appends about 75 of its own, and a Unix socket's path ends at 107."""


def make(run_id: str) -> Path:
    """A new folder that only its owner enters, in the host's folder for temporary files or, where that has a long name, in /tmp."""
    root = tempfile.gettempdir()
    folder = Path("/tmp" if len(root) > LONGEST_ROOT else root) / f"nrl-{run_id[:8]}"
    folder.mkdir(mode=0o700)
    return folder
