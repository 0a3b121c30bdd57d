"""vLLM loads this in each of its processes, by two entry points: they end when the engine's owner does.

vLLM's engine core and workers do not notice that the process which started them was killed, and would keep their
memory for ever. Here each of them waits for the owner's end on a thread of its own, which costs no CPU time.
`vllm.platform_plugins` are loaded first, as soon as vLLM is imported, unless `VLLM_TARGET_DEVICE` is set;
`vllm.general_plugins` always, but only after a new process has met the engine.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from importlib.metadata import entry_points

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.generation.segments import mapped_inodes, unlink_segments

logger = logging.getLogger(__name__)

GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
NAME = "nemo_rl_like"
OWNER_ENV = "NRL_ENGINE_OWNER"
"""Process id of the engine's owner, set in the environment of vLLM's processes."""

_watched: set[int] = set()


def register() -> None:
    """Watch the owner that `NRL_ENGINE_OWNER` names; does nothing without it, in the owner itself, and twice."""
    owner = int(os.environ.get(OWNER_ENV, "0"))
    if owner in (0, os.getpid()) or owner in _watched:
        return
    _watched.add(owner)
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        _end()
    threading.Thread(target=_wait, args=(handle,), name="owner-watch", daemon=True).start()


def require_registered() -> None:
    """Raise InputError unless vLLM will find this plugin in both groups."""
    for group in GROUPS:
        if not any(point.name == NAME for point in entry_points(group=group)):
            raise InputError(
                f"the installed package metadata has no entry point {NAME!r} in the group {group!r}, so vLLM's "
                "processes would outlive a killed engine; install the package again (`uv pip install -e .` in the "
                "repository)"
            )


def _wait(handle: int) -> None:
    select.select([handle], [], [])
    unlink_segments(mapped_inodes([os.getpid()]))
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
