"""Frequencies of rotary positions, plain and stretched to contexts longer than the trained one.

f_i = theta^(-2i / d) is the angle that dimension pair i turns by a position (Su et al. 2021, arXiv 2104.09864, eq. 15); its wavelength is 2 pi / f_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_rl_like.model.yarn import temperature
from nemo_rl_like.spec.model import LinearRope, Llama3Rope, RopeScalingSpec, YarnRope


def rotary_frequencies(channels: int, theta: float, scaling: RopeScalingSpec | None = None) -> Tensor:
    """float32 [channels / 2] for the channels of a head that positions turn, in radians per position."""
    exponent = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
    plain = 1.0 / (theta**exponent)
    if scaling is None:
        return plain
    if isinstance(scaling, LinearRope):
        return plain / scaling.factor
    return _llama3(plain, scaling) if isinstance(scaling, Llama3Rope) else _yarn(plain, channels, theta, scaling)


def rotary_amplitude(scaling: RopeScalingSpec | None) -> float:
    """Factor of cosines and sines: YaRN's temperature, 0.1 ln(factor) + 1 unless given (Peng et al. 2023, arXiv 2309.00071, eq. 22)."""
    if not isinstance(scaling, YarnRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return temperature(scaling.factor)
    return temperature(scaling.factor, scaling.mscale) / temperature(scaling.factor, scaling.mscale_all_dim)


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
