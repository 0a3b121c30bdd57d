"""How this process and its Ray know each other. Ray's daemons listen on every interface: without a token whoever reaches a port runs code."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.spec.cluster import ClusterSpec

MODE_ENV, PATH_ENV = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
_NAME = "token"

Mode = Literal["disabled", "token"]


def mode_of(spec: ClusterSpec) -> Mode:
    """The mode that is asked for, by default the one that this process has. Raises SpecError when it has another.

    Ray reads `RAY_AUTH_MODE` once, when it is imported; this package sets it to `token` unless it is set already.
    """
    has: Mode = "token" if get_authentication_mode() == AuthenticationMode.TOKEN else "disabled"
    if spec.auth not in (None, has):
        raise SpecError(
            f"`cluster.auth` is {spec.auth}, but ray was imported with {MODE_ENV}={os.environ.get(MODE_ENV, 'unset')}; set {MODE_ENV}={spec.auth} "
            "before the start, or leave `cluster.auth` out"
        )
    return has


def variables(spec: ClusterSpec, environ: Mapping[str, str], own_folder: Path | None) -> dict[str, str]:
    """What processes of a Ray have in their environment: the mode, and the token's file.

    Args:
        spec: the cluster.
        environ: this process's environment.
        own_folder: folder of a Ray that this process starts, which gets a token of its own; None: it joins one.

    Raises:
        SpecError: another mode is asked for, or there is no token for a cluster that is joined.
    """
    mode = mode_of(spec)
    if mode == "disabled":
        return {MODE_ENV: mode}
    if own_folder is not None:
        return {MODE_ENV: mode, PATH_ENV: str(_write(own_folder))}
    if not environ.get(PATH_ENV):
        raise SpecError(
            f"`cluster.address` is joined with a token, but {PATH_ENV} is not set; point it at a file (mode 0600, same content on every host) that holds "
            f"the token, or set {MODE_ENV}=disabled for a cluster that has none"
        )
    return {MODE_ENV: mode, PATH_ENV: environ[PATH_ENV]}


@cache
def _token() -> str:
    """256 bits; one for all Rays of this process, which reads it once."""
    return secrets.token_hex(32)


def _write(folder: Path) -> Path:
    """The token in a file that only its owner reads."""
    path = folder / _NAME
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(_token())
    return path
