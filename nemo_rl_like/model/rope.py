"""Frequencies of rotary positions, plain and stretched to contexts longer than the trained one.

f_i = theta^(-2i / d) is the angle that dimension pair i turns by a position (Su et al. 2021, arXiv 2104.09864, eq. 15); its wavelength is 2 pi / f_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_rl_like.model.yarn import temperature
from nemo_rl_like.spec.model import LinearRope, Llama3Rope, LongRope, RopeScalingSpec, YarnRope


def rotary_frequencies(
    channels: int, theta: float, scaling: RopeScalingSpec | None = None, positions: int | None = None
) -> Tensor:
    """float32 [channels / 2] for the channels of a head that positions turn, in radians per position.

    `positions`: the model's longest context, in tokens, which LongRoPE's factors depend on. Raises ValueError if it has other numbers of factors.
    """
    exponent = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
    plain = 1.0 / (theta**exponent)
    if scaling is None:
        return plain
    if isinstance(scaling, LinearRope):
        return plain / scaling.factor
    if isinstance(scaling, LongRope):
        return plain / _long_factors(scaling, channels, positions)
    return _llama3(plain, scaling) if isinstance(scaling, Llama3Rope) else _yarn(plain, channels, theta, scaling)


def rotary_amplitude(scaling: RopeScalingSpec | None, positions: int | None = None) -> float:
    """Factor of cosines and sines, where none is given: YaRN's temperature, 0.1 ln(factor) + 1 (Peng et al. 2023, arXiv 2309.00071, eq. 22), or
    LongRoPE's sqrt(1 + ln(s) / ln(original positions)) for `positions` s times those (Ding et al. 2024, arXiv 2402.13753)."""
    if isinstance(scaling, LongRope):
        return _long_amplitude(scaling, positions)
    if not isinstance(scaling, YarnRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return temperature(scaling.factor)
    return temperature(scaling.factor, scaling.mscale) / temperature(scaling.factor, scaling.mscale_all_dim)


def _long_factors(scaling: LongRope, channels: int, positions: int | None) -> Tensor:
    """float32 [channels / 2]. One choice for all rows of a model, so that what a token sees of those before it does not depend on what follows."""
    factors = scaling.long_factor if (positions or 0) > scaling.original_positions else scaling.short_factor
    if len(factors) != channels // 2:
        raise ValueError(f"longrope has {len(factors)} factors for {channels // 2} pairs of channels")
    return torch.tensor(factors, dtype=torch.float32)


def _long_amplitude(scaling: LongRope, positions: int | None) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = (positions or 0) / scaling.original_positions
    return math.sqrt(1 + math.log(stretch) / math.log(scaling.original_positions)) if stretch > 1 else 1.0


def _llama3(plain: Tensor, scaling: Llama3Rope) -> Tensor:
    """Long waves are stretched by the factor, short ones stay, and between them the share that stays goes linearly with positions / wavelength
    (Llama 3.1's release, 2024)."""
    turns = scaling.original_positions * plain / (2 * math.pi)  # of each pair over the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stays = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return stays * plain + (1 - stays) * plain / scaling.factor


def _yarn(plain: Tensor, channels: int, theta: float, scaling: YarnRope) -> Tensor:
    """Pairs that turn more than `beta_fast` times over the trained context stay, those below `beta_slow` turns are stretched, with a linear ramp
    over the pairs between (Peng et al. 2023, arXiv 2309.00071, sec. 3.2)."""

    def pair_of(turns: float) -> float:
        """Index of the pair that turns so often over the trained context."""
        return channels * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    width = last - first if last != first else 1e-3
    stretched = ((torch.arange(channels // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return stretched * plain / scaling.factor + (1 - stretched) * plain
