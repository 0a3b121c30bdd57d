"""What can go wrong on a cluster, each as one error that names who, where and why.

The errors keep all they know in `args`, so that they travel between processes unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_like.artifacts.errors import NrlError


class ClusterError(NrlError):
    """Base of every error of this room."""


class ClusterStartError(ClusterError):
    """Ray or a worker group could not be started as asked."""


class WorkerDied(ClusterError):
    """A worker process ended although nobody asked it to."""

    def __init__(self, role: str, rank: int, node: str, cause: str, log_tail: str) -> None:
        """`role` is the group's name; `cause` the exit cause; `log_tail` the last lines the worker wrote."""
        super().__init__(role, rank, node, cause, log_tail)
        self.role, self.rank, self.node, self.cause, self.log_tail = role, rank, node, cause, log_tail

    def __str__(self) -> str:
        return f"worker {self.role!r} rank {self.rank} on node {self.node} died: {self.cause}{_tail(self.log_tail)}"


class WorkerFailed(ClusterError):
    """A service of a worker raised an exception that is not one of ours."""

    def __init__(self, role: str, rank: int, node: str, what: str, error: str, traceback: str, log_tail: str) -> None:
        """`what` names the call, `error` is the exception's own text, `traceback` the worker's stack."""
        super().__init__(role, rank, node, what, error, traceback, log_tail)
        self.role, self.rank, self.node, self.what = role, rank, node, what
        self.error, self.traceback, self.log_tail = error, traceback, log_tail

    def __str__(self) -> str:
        where = f"worker {self.role!r} rank {self.rank} on node {self.node}"
        return f"{where} failed in {self.what}: {self.error}\n{self.traceback.rstrip()}{_tail(self.log_tail)}"


class DeadlineExceeded(ClusterError):
    """A wait ran past its deadline; the workers that still ran were stopped."""

    def __init__(self, what: str, seconds: float, running: Sequence[str], log_tail: str = "") -> None:
        """`running` names every worker that had not answered; `log_tail` ends with the stacks of the first one."""
        super().__init__(what, seconds, tuple(running), log_tail)
        self.what, self.seconds, self.running, self.log_tail = what, seconds, tuple(running), log_tail

    def __str__(self) -> str:
        who = ", ".join(self.running) or "nobody"
        return (
            f"{self.what} did not finish within {self.seconds:g} s; still running: {who}. "
            f"Raise the deadline (`cluster.step_timeout_s` or `cluster.start_timeout_s`) if the work is merely slow"
            f"{_tail(self.log_tail)}"
        )


def _tail(text: str) -> str:
    return f"\nlast log lines:\n{text.rstrip()}" if text.strip() else "\n(its log is empty)"
