"""Which tasks a step asks: a pure function of the seed and of how many were drawn before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_like.data.order import DataPosition, ShuffledOrder, check_resumes
from nemo_rl_like.environment.types import Task


@dataclass(frozen=True, slots=True)
class TaskList:
    """The tasks of a split, without their content."""

    split: str
    """Name of the split."""
    ids: tuple[str, ...]
    """Task ids, in the environment's order."""
    sha256: str
    """Hash of the tasks' ids and content."""


def task_list(split: str, tasks: Sequence[Task]) -> TaskList:
    """The list of these tasks."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps([task.id, dict(task.data)], sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return TaskList(split=split, ids=tuple(task.id for task in tasks), sha256=digest.hexdigest())


class TaskOrder:
    """Shuffled passes over a task list; every epoch is its own permutation, and a step may reach over its end."""

    def __init__(self, tasks: TaskList, seed: int) -> None:
        self._tasks = tasks
        self._order = ShuffledOrder(len(tasks.ids), seed)

    def start(self) -> DataPosition:
        """The position of a new run."""
        return DataPosition(self._tasks.sha256)

    def draw(self, position: DataPosition, count: int) -> tuple[str, ...]:
        """Ids of the next `count` tasks.

        Raises InputError when the position was saved for other tasks.
        """
        check_resumes(position, self._tasks.sha256, f"the environment's {self._tasks.split} split")
        return tuple(self._tasks.ids[draw.index] for draw in self._order.draws(position.consumed, count))
