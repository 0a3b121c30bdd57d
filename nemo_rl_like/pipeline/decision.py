"""Whether a stage is run, resumed or skipped, from the record of its last start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import hash_path
from nemo_rl_like.pipeline.keys import Ingredients
from nemo_rl_like.pipeline.records import StageRecord

Action = Literal["run", "resume", "skip"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a stage, and why."""

    action: Action
    reason: str


def decide(folder: Path, record: StageRecord | None, made_from: Ingredients) -> Decision:
    """What to do with a stage, given the record of its last start."""
    if record is None:
        return Decision("run", "not started before")
    if record.key != made_from.key:
        changes = made_from.changes_from(record.made_from)
        return Decision("run", "changed since it was run: " + "; ".join(changes[:3]) + (" ..." if changes[3:] else ""))
    if record.state != "done" or record.output is None:
        return Decision("resume", f"{'killed' if record.state == 'running' else record.state} half-way")
    output = record.output
    try:
        content = hash_path(folder / output.path)
    except InputError:
        return Decision("resume", f"its output {output.path} is missing")
    if content != output.content_hash:
        return Decision("resume", f"its output {output.path} was changed after it was made")
    return Decision("skip", f"done before with the same inputs, key {made_from.key[:12]}")
