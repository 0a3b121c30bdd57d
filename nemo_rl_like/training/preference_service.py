"""`PreferenceService`: pairs or judged completions of a file as token batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeAlias, TypeVar, cast

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.datasets import conversation_key, hold_out
from nemo_rl_like.data.preference_rows import judged_rows, pair_rows
from nemo_rl_like.data.preferences import Judged, Pair, PreferenceDataset, load_judged, load_pairs
from nemo_rl_like.data.trained_rows import TrainedRows
from nemo_rl_like.spec.preference import PreferenceDataSpec, PreferenceStageSpec
from nemo_rl_like.training.data_service import DataService

T = TypeVar("T", Pair, Judged)
Example: TypeAlias = Pair | Judged


class FilePreferences(Generic[T]):
    """The examples of a file, those of a fraction of the prompts held out."""

    def __init__(self, dataset: PreferenceDataset[T], fraction: float, seed: int) -> None:
        self.source, self.sha256 = dataset.source, dataset.sha256
        self._train, self._held = hold_out(dataset.examples, lambda e: conversation_key(e.prompt), fraction, seed)

    def train_size(self) -> int:
        """Training examples."""
        return len(self._train)

    def train(self, index: int, epoch: int) -> T:
        """One training example, the same in every epoch."""
        return self._train[index]

    def validation(self, count: int) -> Sequence[T]:
        """The first `count` held-out examples."""
        return self._held[:count]


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


def _open(data: PreferenceDataSpec, unpaired: bool, seed: int) -> FilePreferences[Pair] | FilePreferences[Judged]:
    if unpaired:
        return FilePreferences(load_judged(data.path, unpair=data.unpair), data.validation_fraction, seed)
    return FilePreferences(load_pairs(data.path), data.validation_fraction, seed)


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
