"""`rollouts.jsonl`: every episode of a run, one line each, in batch order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl_like.observe.jsonl import JsonLines


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One episode as it was trained on."""

    task_id: str
    """Id of the task it answers."""
    group: int
    """Group whose samples are compared."""
    episode: int
    """Episode's number in the step."""
    prompt_ids: tuple[int, ...]
    """Token ids before the first sampled one."""
    sampled_ids: tuple[int, ...]
    """Token ids that the policy sampled, over all turns."""
    reward: float | None
    """The reward that is trained; None = invalid."""
    rewards: Mapping[str, float]
    """Rewards by name."""
    version: int
    """Weight version that sampled the first token."""
    stop: str
    """Why it ended."""
    valid: bool
    """False: could not be scored, not trained."""
    response: str = ""
    """The sampled text, for people."""


class RolloutLog:
    """Appends the episodes of each step."""

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        """As `JsonlSink`: `resume_at` is the byte offset from a checkpoint."""
        self._lines = JsonLines(path)
        if resume_at is not None:
            self._lines.truncate(resume_at)

    def write(self, step: int, records: Iterable[RolloutRecord]) -> None:
        """Append one line an episode."""
        for record in records:
            self._lines.append({"step": step, **asdict(record)})

    def position(self) -> int:
        """Byte offset to keep in a checkpoint; everything before it is on disk."""
        return self._lines.position()

    def truncate(self, offset: int) -> None:
        """Drop what was written after `offset`."""
        self._lines.truncate(offset)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
