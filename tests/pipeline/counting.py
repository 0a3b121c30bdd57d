"""Stages without a model for pipeline tests: they do real file work in steps, save their state, and resume from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from nemo_rl_like.artifacts.errors import StoppedBySignal
from nemo_rl_like.artifacts.files import atomic_write
from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Artifact, Checkpoint, Report, ServingBundle
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, StageSpec

CLASSES = {kind: f"tests.pipeline.counting:{kind.capitalize()}" for kind in ("sft", "rl", "evaluate", "export")}


class Interruption:
    """What a test makes the next stage do after its first step."""

    error: ClassVar[BaseException | None] = None


class Counting:
    """Hashes its inputs and its own steps, one step at a time; saves after each."""

    input_types: ClassVar[tuple[type[Artifact], ...]] = (Checkpoint,)
    output_type: ClassVar[type[Artifact]] = Checkpoint

    def __init__(self, stage_spec: StageSpec, experiment_spec: ExperimentSpec) -> None:
        self.spec = stage_spec
        self.problems: list[str] = []

    def preflight(self) -> list[str]:
        return ["`steps` is 13, must not be; use 12"] if self.steps() == 13 else []

    def steps(self) -> int:
        return self.spec.steps if isinstance(self.spec, TRAINING_STAGES) else 1

    def run(self, context: StageContext, inputs: Mapping[str, Artifact]) -> Artifact:
        state_file = context.folder / "state.json"
        if not context.resume:
            assert not list(context.folder.iterdir()), "a stage that does not resume starts in an empty folder"
        state = (
            json.loads(state_file.read_text()) if state_file.exists() else {"done": 0, "digest": start(context, inputs)}
        )
        while state["done"] < self.steps():
            digest = hashlib.sha256(f"{state['digest']} {state['done']}".encode()).hexdigest()
            state = {"done": state["done"] + 1, "digest": digest}
            atomic_write(state_file, json.dumps(state).encode())
            if Interruption.error is not None:
                error, Interruption.error = Interruption.error, None
                raise error
        return self.finish(context.folder, state)

    def finish(self, folder: Path, state: Mapping[str, Any]) -> Artifact:
        output = folder / "out"
        output.mkdir(exist_ok=True)
        atomic_write(output / "digest.txt", str(state["digest"]).encode())
        return self.output_type.of(output)


def start(context: StageContext, inputs: Mapping[str, Artifact]) -> str:
    """What a stage begins with: its seed and its inputs, read from disk."""
    read = {name: (artifact.path / "digest.txt").read_text() for name, artifact in inputs.items()}
    return json.dumps([context.seed, read])


class Sft(Counting):
    pass


class Rl(Counting):
    pass


class Evaluate(Counting):
    output_type = Report


class Export(Counting):
    output_type = ServingBundle


class Greedy(Counting):
    """Takes what no stage makes."""

    input_types = (ServingBundle,)


STOP = StoppedBySignal("asked to stop")
