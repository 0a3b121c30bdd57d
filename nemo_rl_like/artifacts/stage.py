"""The Stage protocol: a typed piece of a pipeline that turns artifacts into an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.artifacts.types import Artifact


@dataclass(frozen=True, slots=True)
class StageContext:
    """Where one stage works and how it was started."""

    stage_name: str
    """Name of the stage: unique in its pipeline."""
    folder: Path
    """The stage's own folder, which exists; everything that the stage writes goes below it."""
    run_folder: Path
    """The output folder of the run, which holds all stage folders."""
    seed: int
    """Seed of the experiment."""
    resume: bool
    """True when `folder` holds a half-done stage of the same key: continue from its newest valid checkpoint, or start
    over where there is none. False: `folder` is empty."""
    start: str | None = None
    """Name of the stage whose artifact this one starts from, among `inputs`; None: it starts from the spec's model."""
    lineage: Mapping[str, JSON] = field(default_factory=dict)
    """What is known of the stages behind this one, for what leaves the run."""
    plain: bool = False
    """Print lines only: no progress bars, colours or control codes."""

    def start_of(self, inputs: Mapping[str, Artifact]) -> Artifact | None:
        """The artifact that the stage starts from."""
        return None if self.start is None else inputs[self.start]


class Stage(Protocol):
    """One stage; built as `Class(stage_spec, experiment_spec)`, which starts and loads nothing."""

    input_types: tuple[type[Artifact], ...]
    """Types that this stage accepts from the stages that it builds on."""
    output_type: type[Artifact]
    """Type that `run` returns."""

    def preflight(self) -> list[str]:
        """Problems that would stop this stage, found without starting anything; each names field, value, limit and fix."""
        ...

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        """Do the work; `inputs` holds the artifact of each stage that this one builds on, by that stage's name.

        Killed at any point and run again with `context.resume`, it must return the same artifact.
        """
        ...
