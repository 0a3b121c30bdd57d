"""4-bit NormalFloat (NF4): a matrix as codes of 16 levels and a scale for every 64 of them. Dettmers et al. 2023, arXiv 2305.14314, sec. 3.

A block of 64 neighbouring inputs of one output has the largest absolute value of it as scale, and each value the nearest of the 16 levels times that. With
double quantisation the scales, less their mean, are held in 8 bits of a dynamic tree (Dettmers 2016, arXiv 1511.04561), a block of 256 with
one scale. Values are those of bitsandbytes, bit for bit. On every device this is plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from nemo_rl_like.model.nf4_map import BLOCK, GROUP

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, each of as many values, with an exact zero (appendix E)."""
_TINY = 1e-38
"""The least scale that is divided by."""

Cut = Callable[[Sequence[Tensor]], Tensor]
"""From whole matrices [out, n] to this rank's part of the parameter that is made of them, rows of theirs and parts of those."""


@cache
def levels(device: torch.device) -> Tensor:
    """float32 [16]."""
    return torch.tensor(LEVELS, device=device)


@cache
def pairs_of_levels(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values of a byte of codes."""
    byte = torch.arange(256, device=device)
    return levels(device)[torch.stack([byte >> 4, byte & 15], dim=1)]


@cache
def tree_levels(device: torch.device) -> Tensor:
    """float32 [256], ascending: 0, 1, and of each power of ten from 1e-6 to 1 twice as many numbers between its tenth and itself as of the last."""
    found = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = (10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        found += [*middles, *(-x for x in middles)]
    return torch.tensor(sorted(found), device=device)


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """uint8: index of the nearest of an ascending `table` for each value; of two, the lower."""
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> codes uint8 [out, in] below 16, and scales float32 [out, in / 64]."""
    blocks = matrix.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2)
    shares = (blocks * (1.0 / scales.clamp(min=_TINY))[..., None]).clamp(-1, 1)
    return nearest(shares, levels(matrix.device)).flatten(1), scales


@dataclass(frozen=True, slots=True)
class DoubleScales:
    """Scales [out, n] of blocks in 8 bits."""

    codes: Tensor
    """uint8 [out, n]."""
    first: Tensor
    """int32 [out] place of a row's first block among those of the whole matrices, each of which begins with a group of its own."""
    factors: Tensor
    """float32 [groups] scales of the scales, of the whole matrices."""
    means: Tensor
    """float32 [groups]: what was taken from the scales of a group."""

    def values(self) -> Tensor:
        """float32 [out, n]."""
        columns = torch.arange(self.codes.shape[1], device=self.codes.device)
        group = (self.first[:, None] + columns) // GROUP
        return tree_levels(self.codes.device)[self.codes.int()] * self.factors[group] + self.means[group]

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(x.nbytes for x in (self.codes, self.first, self.factors, self.means))


def doubly(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales [out, n] of one whole matrix -> codes uint8 [out, n], float32 [groups] scales of theirs and as often their mean."""
    mean = scales.mean()
    flat = (scales - mean).flatten()
    padded = nn.functional.pad(flat, (0, -flat.numel() % GROUP)).unflatten(0, (-1, GROUP))
    factors = padded.abs().amax(1)
    shares = (padded * (1.0 / factors.clamp(min=_TINY))[:, None]).clamp(-1, 1)
    codes = nearest(shares, tree_levels(scales.device)).flatten()[: flat.numel()]
    return codes.view_as(scales), factors, mean.expand(len(factors))


class Nf4Weight(nn.Parameter):
    """A frozen matrix [out, in] in NF4, as a parameter of packed codes uint8 [out, in / 2]; `dequantized` gives its values.

    Each rank quantises whole matrices and keeps its part, so that every layout has the same values.
    """

    double_scales: bool
    """Hold the scales in 8 bits."""
    dtype_of_values: torch.dtype
    scales: Tensor | DoubleScales
    """float32 [out, in / 64], or those; of a matrix that has been taken."""

    def __new__(cls, like: Tensor) -> Nf4Weight:
        """Room for a matrix of this shape, type and device."""
        rows, columns = like.shape
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=like.device)
        made: Nf4Weight = torch.Tensor._make_subclass(cls, codes, False)
        made.double_scales, made.dtype_of_values = False, like.dtype
        return made

    def quantize(self, wholes: Sequence[Tensor], cut: Cut) -> None:
        """Take the part of these whole matrices [out, in], rounded to the model's type, that `cut` gives."""
        pairs = [quantized(whole.to(self.dtype_of_values)) for whole in wholes]
        codes = cut([codes for codes, _ in pairs])
        self.data.copy_(codes[:, ::2] << 4 | codes[:, 1::2])
        scales = [scales for _, scales in pairs]
        self.scales = self._doubly(scales, cut) if self.double_scales else cut(scales).to(self.device)

    def _doubly(self, scales: Sequence[Tensor], cut: Cut) -> DoubleScales:
        parts, places, groups = [doubly(x) for x in scales], [], 0
        for of_matrix, (_, factors, _) in zip(scales, parts, strict=True):
            count = torch.arange(of_matrix.numel(), dtype=torch.int32) + groups * GROUP
            places.append(count.view_as(of_matrix))
            groups += len(factors)
        codes, first = cut([codes for codes, _, _ in parts]).contiguous(), cut(places)[:, 0].contiguous()
        factors, means = (torch.cat([part[i] for part in parts]) for i in (1, 2))
        return DoubleScales(*(x.to(self.device) for x in (codes, first, factors, means)))

    def dequantized(self) -> Tensor:
        """[out, in] in the model's type."""
        scales = self.scales if isinstance(self.scales, Tensor) else self.scales.values()
        values = nn.functional.embedding(self.data.int(), pairs_of_levels(self.device)).flatten(1)
        return values.unflatten(1, (-1, BLOCK)).mul_(scales[..., None]).flatten(1).to(self.dtype_of_values)

    @property
    def bytes(self) -> int:
        """What codes and scales take."""
        return self.data.nbytes + (self.scales.nbytes if isinstance(self.scales, Tensor) else self.scales.bytes)


def shape_of(weight: Tensor) -> tuple[int, int]:
    """(out, in) of a matrix, however it is held."""
    rows, columns = weight.shape
    return rows, 2 * columns if isinstance(weight, Nf4Weight) else columns


def values_of(weight: Tensor) -> Tensor:
    """The matrix, or what one in NF4 stands for."""
    return weight.dequantized() if isinstance(weight, Nf4Weight) else weight
