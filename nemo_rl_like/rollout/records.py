"""The record of rollouts: one JSON line an episode, token for token, appended so that a resumed run repeats and loses none."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.rollout.episode import Episode, Segment


def append_records(path: Path, offset: int, step: int, episodes: Sequence[Episode]) -> int:
    """Cut the file at `offset` bytes, append a line for each episode, sync it to disk and return the new offset.

    The offset of the last checkpoint makes a resumed run overwrite what a killed one wrote after it.

    Raises InputError when the file is shorter than `offset`: it is not the file of that checkpoint.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    if size < offset:
        raise InputError(
            f"{path}: has {size} bytes, but the run had written {offset}; the file was cut or replaced since"
        )
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(offset)
        file.seek(offset)
        for episode in episodes:
            file.write(record_line(step, episode).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def record_line(step: int, episode: Episode) -> str:
    """One episode as JSON; the reward of an invalid one is null."""
    return json.dumps(
        {
            "step": step,
            "episode": episode.id,
            "group": episode.group_id,
            "task": episode.task_id,
            "prompt": episode.prompt,
            "response": episode.response,
            "reward": None if math.isnan(episode.reward) else episode.reward,
            "rewards": dict(episode.rewards),
            "stop": episode.stop,
            "invalid": episode.invalid,
            "segments": [_segment(segment) for segment in episode.segments],
        },
        ensure_ascii=False,
    )


def _segment(segment: Segment) -> dict[str, list[int]]:
    versions = sorted({version for version in segment.version if version >= 0})
    return {
        "prompt_ids": list(segment.tokens[: segment.prompt_len]),
        "ids": list(segment.tokens[segment.prompt_len :]),
        "sampled": [int(s) for s in segment.sampled[segment.prompt_len :]],
        "versions": versions,
    }
