"""Low-rank adapters of experts whose matrices lie in one tensor of each kind, as GPT-OSS's files have them: W_e + scale (B_e A_e)^T for [in, out] matrices.

PEFT knows them as `target_parameters`. Checkpoints hold A [experts, rank, in] and B [experts, out, rank]; PEFT's files have both as matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

STACKED = ("gate_up_proj", "down_proj")
"""Tensors of a layer's experts, by Hugging Face's name."""
_EXPERTS = ".mlp.experts."

LowRank = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank] of one expert."""


class StackedLowRank(nn.Module):
    """A and B of one tensor: those of this rank's experts."""

    def __init__(self, like: Tensor, rank: int) -> None:
        """`like`: [experts, in, out]."""
        super().__init__()
        experts, inputs, outputs = like.shape
        self.a, self.b = (nn.Parameter(like.new_empty(experts, *shape)) for shape in ((rank, inputs), (outputs, rank)))


class StackedAdapter(nn.Module):
    """The adapters of a layer's experts."""

    def __init__(self, parts: Mapping[str, StackedLowRank], scale: float) -> None:
        """`parts` by names of `STACKED`."""
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self._of, self.scale = dict(parts), scale
        self.enabled = True

    def of_experts(self, name: str, count: int) -> Sequence[LowRank | None]:
        """Of each of this rank's experts; None: that tensor has no adapter, or they are off."""
        part = self._of.get(name)
        if part is None or not self.enabled:
            return [None] * count
        # `unbind` has one backward for all experts; an index would make a gradient of the whole tensor for each.
        return list(zip(part.a.unbind(), part.b.unbind(), strict=True))

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """float32 [experts, in, out]: the tensor with the products added."""
        part = self._of.get(name)
        if part is None:
            return weight.float()
        return weight.float() + self.scale * (part.b.float() @ part.a.float()).transpose(1, 2)


def as_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters by their names in checkpoints, those of stacked experts as PEFT's: A [experts * rank, in], B [out, rank * experts].

    Where both have some, PEFT wraps the second around the first, so its names do not say which is which.
    """
    kinds = [name for name in STACKED if any(f"{_EXPERTS}{name}." in key for key in tensors)]
    found = {}
    for key, tensor in tensors.items():
        name = next((name for name in kinds if f"{_EXPERTS}{name}." in key), None)
        if name is None:
            found[key] = tensor
            continue
        inner = ".base_layer" if len(kinds) > 1 and name == STACKED[0] else ""
        matrix = tensor.flatten(0, 1) if ".lora_A." in key else tensor.permute(1, 2, 0).flatten(1)
        found[key.replace(f"{_EXPERTS}{name}.", f"{_EXPERTS.removesuffix('.')}{inner}.")] = matrix.contiguous()
    return found
