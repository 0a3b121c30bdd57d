"""`PreferenceService`: pairs or judged completions of a file as token batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar, cast

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.preference_rows import judged_rows, pair_rows
from nemo_rl_like.data.preferences import Judged, Pair, PreferenceDataset, load_judged, load_pairs
from nemo_rl_like.data.trained_rows import TrainedRows
from nemo_rl_like.spec.preference import PreferenceDataSpec, PreferenceStageSpec
from nemo_rl_like.training.data_service import DataService, FileExamples

T = TypeVar("T", Pair, Judged)
Example: TypeAlias = Pair | Judged


class PreferenceService(DataService[Example]):
    """Batches of pairs, or of judged completions with their mismatched ones."""

    def __init__(
        self,
        context: RankContext | None,
        *,
        data: PreferenceDataSpec,
        unpaired: bool,
        tokenizer_folder: str,
        seed: int,
        max_tokens: int,
    ) -> None:
        """Read and check the data. Raises InputError."""
        self._too_long, self._unpaired = data.too_long, unpaired
        examples = _open(data, unpaired, seed)
        super().__init__(examples, tokenizer_folder=tokenizer_folder, seed=seed, max_tokens=max_tokens)

    def _rows(self, examples: Sequence[Example]) -> TrainedRows:
        limit, too_long = self._max_tokens, self._too_long
        if self._unpaired:
            judged = cast(Sequence[Judged], examples)
            return judged_rows(judged, self._renderer, max_tokens=limit, too_long=too_long)
        return pair_rows(cast(Sequence[Pair], examples), self._renderer, max_tokens=limit, too_long=too_long)


def _open(data: PreferenceDataSpec, unpaired: bool, seed: int) -> FileExamples[Pair] | FileExamples[Judged]:
    if unpaired:
        return _split(load_judged(data.path, unpair=data.unpair), data.validation_fraction, seed)
    return _split(load_pairs(data.path), data.validation_fraction, seed)


def _split(dataset: PreferenceDataset[T], fraction: float, seed: int) -> FileExamples[T]:
    return FileExamples(dataset.source, dataset.sha256, dataset.examples, lambda e: e.prompt, fraction, seed)


def check_preferences(stage: PreferenceStageSpec, seed: int) -> None:
    """Open the data and see that it has what the stage reads. Raises InputError."""
    examples = _open(stage.data, stage.unpaired, seed)
    first = examples.train(0, 0)
    if stage.needs_margin and isinstance(first, Pair) and first.margin is None:
        raise InputError(
            f"{first.where}: has no `margin`, which the `offset` of dpo is measured in; add one to every line, or remove `offset`"
        )
    held = len(examples.validation(stage.validation_pairs))
    if stage.validate_every_steps and held < 1 + stage.unpaired:
        raise InputError(
            f"{examples.source}: `data.validation_fraction` {stage.data.validation_fraction} holds out {held} examples, and "
            "`validate_every_steps` needs some; raise it, or set `validate_every_steps: 0`"
        )
