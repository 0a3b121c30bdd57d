"""Decoding on two models at once: a geometric mixture of what they would say next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.model.decode import Decoder, DecodeState
from nemo_rl_like.model.forward import MegatronModel


@dataclass(frozen=True, slots=True)
class MixedState:
    """The caches of both models for the same live rows."""

    first: DecodeState
    second: DecodeState

    @property
    def group_of_row(self) -> Tensor:
        """int64 [R] index of each row's prompt among the live ones."""
        return self.first.group_of_row

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only; see `DecodeState.keep`."""
        self.first.keep(rows)
        self.second.keep(rows)


class MixedDecoder:
    """A `Decoder` of p proportional to first^(1 - share) second^share: the softmax of (1 - share) z_first + share z_second.

    Both models have the same layout and vocabulary. Munos et al. 2023 (arXiv 2312.00886), section 6.
    """

    def __init__(self, first: MegatronModel, second: MegatronModel, share: float) -> None:
        self._first, self._second, self._share = Decoder(first), Decoder(second), share

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], samples: Sequence[int]) -> tuple[MixedState, Tensor | None]:
        """See `Decoder.prefill`."""
        (one, first), (two, second) = (d.prefill(prompts, samples) for d in (self._first, self._second))
        return MixedState(one, two), self._mixed(first, second)

    @torch.inference_mode()
    def step(self, state: MixedState, tokens: Tensor) -> Tensor | None:
        """See `Decoder.step`."""
        return self._mixed(self._first.step(state.first, tokens), self._second.step(state.second, tokens))

    def _mixed(self, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return None if first is None or second is None else torch.lerp(first, second, self._share)
