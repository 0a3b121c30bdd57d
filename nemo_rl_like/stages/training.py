"""What the training stages share: the Trainer with its files and its screen."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.artifacts.stage import StageContext
from nemo_rl_like.checkpoint.layout import ModelIdentity
from nemo_rl_like.observe.terminal import Terminal
from nemo_rl_like.policy.client import TrainedModels
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.stage import CheckpointSpec
from nemo_rl_like.training.recipe import Recipe
from nemo_rl_like.training.screen import MetricFiles, TrainingScreen
from nemo_rl_like.training.trainer import Trainer

LINES = 100
"""At most about this many metric lines are shown of one stage; all are written to metrics.jsonl."""


def train(
    spec: ExperimentSpec,
    context: StageContext,
    recipe: Recipe,
    models: TrainedModels,
    identity: ModelIdentity,
    checkpoint: CheckpointSpec,
) -> Path:
    """Run the recipe in the stage's folder; returns the final checkpoint's folder."""
    files = MetricFiles(context.folder, tensorboard=spec.logging.tensorboard)
    every = max(1, recipe.total_steps // LINES)
    screen = TrainingScreen(Terminal(), context.stage_name, recipe.headline, every)
    try:
        return Trainer(context.folder, recipe, models, identity, checkpoint, files, screen).fit()
    finally:
        files.close()
