"""`RewardDataService`: what a reward model learns from, as token batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.preferences import Pair, load_pairs
from nemo_rl_like.data.ratings import Rated, Stepwise, load_rated, load_stepwise
from nemo_rl_like.data.score_rows import pair_score_rows, rated_rows, stepwise_rows
from nemo_rl_like.data.trained_rows import TrainedRows
from nemo_rl_like.spec.reward_model import (
    PairwiseReward,
    ProcessReward,
    RewardDataSpec,
    RewardLossSpec,
    RewardModelStageSpec,
)
from nemo_rl_like.training.data_service import DataService, FileExamples

Example: TypeAlias = Pair | Rated | Stepwise


class RewardDataService(DataService[Example]):
    """Batches of pairs, ratings or judged solutions, as the loss reads them."""

    def __init__(
        self,
        context: RankContext | None,
        *,
        data: RewardDataSpec,
        loss: RewardLossSpec,
        tokenizer_folder: str,
        seed: int,
        max_tokens: int,
    ) -> None:
        """Read and check the data. Raises InputError."""
        self._loss, self._too_long = loss, data.too_long
        super().__init__(
            open_examples(data, loss, seed), tokenizer_folder=tokenizer_folder, seed=seed, max_tokens=max_tokens
        )

    def _rows(self, examples: Sequence[Example]) -> TrainedRows:
        loss, limit, too_long = self._loss, self._max_tokens, self._too_long
        if isinstance(loss, PairwiseReward):
            return pair_score_rows(cast(Sequence[Pair], examples), self._renderer, max_tokens=limit, too_long=too_long)
        if isinstance(loss, ProcessReward):
            solutions = cast(Sequence[Stepwise], examples)
            return stepwise_rows(
                solutions, self._renderer, separator=loss.separator, max_tokens=limit, too_long=too_long
            )
        return rated_rows(cast(Sequence[Rated], examples), self._renderer, max_tokens=limit, too_long=too_long)


def open_examples(data: RewardDataSpec, loss: RewardLossSpec, seed: int) -> FileExamples[Example]:
    """The file's examples, those of a fraction of the prompts held out. Raises InputError."""
    found: Sequence[Example]
    if isinstance(loss, PairwiseReward):
        pairs = load_pairs(data.path)
        found, sha256 = pairs.examples, pairs.sha256
    elif isinstance(loss, ProcessReward):
        solutions = load_stepwise(data.path, loss.separator)
        found, sha256 = solutions.examples, solutions.sha256
    else:
        ratings = load_rated(data.path)
        found, sha256 = ratings.examples, ratings.sha256
    return FileExamples(data.path, sha256, found, lambda example: example.prompt, data.validation_fraction, seed)


def check_reward_data(stage: RewardModelStageSpec, seed: int) -> None:
    """Open the data and see that it has what the stage reads. Raises InputError."""
    examples = open_examples(stage.data, stage.loss, seed)
    first = examples.train(0, 0)
    if isinstance(stage.loss, PairwiseReward) and stage.loss.margin_weight and cast(Pair, first).margin is None:
        raise InputError(
            f"{first.where}: has no `margin`, which `loss.margin_weight` is of; add one to every line, or remove `margin_weight`"
        )
    if stage.validate_every_steps and not examples.validation(1):
        raise InputError(
            f"{examples.source}: `data.validation_fraction` {stage.data.validation_fraction} holds out no example, and "
            "`validate_every_steps` needs some; raise it, or set `validate_every_steps: 0`"
        )
