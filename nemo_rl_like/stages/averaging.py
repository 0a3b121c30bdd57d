"""The moving average of a stage's weights: a model of its own beside the policy, and a checkpoint of its own at the end."""

from __future__ import annotations

import shutil
from pathlib import Path

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.artifacts.types import Checkpoint
from nemo_rl_like.checkpoint.layout import ModelIdentity, step_of
from nemo_rl_like.checkpoint.writer import CheckpointWriter
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.stage import EmaSpec
from nemo_rl_like.stages.start_model import StartModel
from nemo_rl_like.training.moving_reference import MovingReference

AVERAGED = "averaged"
"""Folder beside `checkpoints`: what a stage with `ema.use` hands on."""


def start_average(
    ema: EmaSpec | None, policy: Policy, spec: ExperimentSpec, model: StartModel
) -> MovingReference | None:
    """The average on the policy's ranks, in float32, as the model that the stage starts from; None without `ema`."""
    if ema is None:
        return None
    average = Policy(policy.group, "average")
    average.host(model.folder, spec.policy.model_copy(update={"fp8": None}), "float32", model.initialize)
    moving = MovingReference.start(policy, average)
    moving.move(1.0)  # the policy's own numbers, also where they were rounded to its type
    return moving


def hand_on(
    ema: EmaSpec | None, average: MovingReference | None, trained: Path, context: StageContext, identity: ModelIdentity
) -> Checkpoint:
    """What later stages get: the `trained` checkpoint, or with `ema.use` one that holds the average's weights alone."""
    if ema is None or average is None or not ema.use:
        return Checkpoint.of(trained)
    root, step = context.folder / AVERAGED, step_of(trained)
    if step is None:
        raise ValueError(f"{trained} is no checkpoint folder")
    if root.exists():
        shutil.rmtree(root)
    with CheckpointWriter(root, step, identity, ("weights",)) as writer:
        shards = average.reference.save(writer.begin())
        return Checkpoint.of(writer.commit({"step": step, "decay": ema.decay}, shards))
