"""Context parallelism: ranks that each have a part of every sequence, and for attention some heads of the whole one.

Attention swaps the two by an all-to-all before and one after (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509), so that every
layout attends as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model.mcore import parallel_state


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share this one's sequences."""

    group: dist.ProcessGroup

    @classmethod
    def of_layout(cls) -> ContextRanks | None:
        """This rank's; None where every rank has whole sequences."""
        group = parallel_state.get_context_parallel_group()
        return cls(group) if group.size() > 1 else None

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.group.size()

    def part(self, x: Tensor) -> Tensor:
        """This rank's columns of [b, s]; s is a multiple of the ranks."""
        return x.chunk(self.size, dim=1)[self.group.rank()].contiguous()

    def scored_here(self, places: Tensor, length: int, padded: int) -> Tensor:
        """int64 [m] which of the flat `places` [M] (of b rows of `length`) are on this rank, whose rows are `padded` long in all."""
        return ((places % length) // (padded // self.size) == self.group.rank()).nonzero()[:, 0]

    def whole(self, own: Tensor, mine: Tensor, count: int) -> Tensor:
        """What each rank has for its scored tokens, [m, ...] for `mine` [m] of `count`, on every rank: [count, ...]."""
        found: Tensor = _Whole.apply(own, mine, count, self.group)
        return found

    def by_heads(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """`attend` on whole sequences [s, b, heads / ranks, d]; parts [s / ranks, b, heads, d] -> [s / ranks, b, heads * d]."""
        out = attend(self._heads(query), self._heads(key), self._heads(value))
        parts = _AllToAll.apply(out.unflatten(0, (self.size, -1)), self.group)
        return parts.movedim(0, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        swapped: Tensor = _AllToAll.apply(x.unflatten(2, (self.size, -1)).movedim(2, 0), self.group)
        return swapped.flatten(0, 1)


class _AllToAll(torch.autograd.Function):
    """[ranks, ...]: part i goes to rank i, and part i of the result came from it. Its backward is itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _swapped(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _swapped(grad, ctx.group), None


def _swapped(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    given = x.contiguous()
    out = torch.empty_like(given)
    dist.all_to_all_single(out, given, group=group)
    return out


class _Whole(torch.autograd.Function):
    """Parts put together on every rank, which all compute the same from it: each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mine: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine)
        out = own.new_zeros(count, *own.shape[1:])
        out[mine] = own
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (mine,) = ctx.saved_tensors
        return grad[mine], None, None, None
