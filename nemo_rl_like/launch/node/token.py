"""The secret by which the hosts of a job know each other: a file that only its owner reads."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from nemo_rl_like.artifacts.errors import SpecError

NAME = "token"
"""Name of the file in a submission's folder."""
PATH_ENV = "RAY_AUTH_TOKEN_PATH"


def make(folder: Path) -> Path:
    """Write a new token of 256 bits, mode 0600, in `folder`; an old one is replaced."""
    path = folder / NAME
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))
    return path


def find(folder: Path) -> Path:
    """The token's file: `RAY_AUTH_TOKEN_PATH`, or the one beside the spec. Raises SpecError when there is none, or others may read it."""
    path = Path(os.environ.get(PATH_ENV) or folder / NAME)
    if not path.is_file():
        raise SpecError(
            f"`launch.auth` is token, and there is no {path}; submit the job with `nrl submit`, which makes one, or write one "
            f"(`umask 077; openssl rand -hex 32 > token`) and point {PATH_ENV} at it on every host; `launch.auth: disabled` needs none"
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077 and path.stat().st_uid == os.getuid():
        raise SpecError(
            f"{path} may be read by others (mode {mode:04o}), must be 0600: `chmod 600 {path}`, or make a new one"
        )
    return path
