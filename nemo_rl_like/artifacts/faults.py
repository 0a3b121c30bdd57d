"""Named points at which a test makes a process die, raise or run out of disk.

`NRL_FAULT="name:k[:action]"` arms one point: at its k-th arrival (counted in this process, from 1) the action happens.
Actions: `kill` (SIGKILL to this process, the default), `stop` (SIGSTOP: it stays where it is), `raise` (RuntimeError), `enospc` (OSError
ENOSPC).
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter

ENV = "NRL_FAULT"
POINTS = (
    "checkpoint.mid_shard",
    "checkpoint.before_manifest",
    "sync.mid",
    "sync.fetch",
    "episode.mid",
    "optimizer.mid",
)
_arrivals: Counter[str] = Counter()


def point(name: str) -> None:
    """Do nothing, unless `NRL_FAULT` arms `name` and this is the arrival it asks for."""
    armed = os.environ.get(ENV)
    if not armed:
        return
    target, _, rest = armed.partition(":")
    if target != name:
        return
    count, _, action = rest.partition(":")
    _arrivals[name] += 1
    if _arrivals[name] != int(count or 1):
        return
    if action in ("", "kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if action == "enospc":
        raise OSError(errno.ENOSPC, f"No space left on device (fault point {name})")
    raise RuntimeError(f"fault point {name}")
