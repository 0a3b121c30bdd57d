"""YaRN's temperature of attention's scores (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""

from __future__ import annotations

import math

from nemo_rl_like.spec.model import RopeScalingSpec, YarnRope


def score_amplitude(scaling: RopeScalingSpec | None) -> float:
    """The part of YaRN's temperature that queries and keys carry whole, where positions turn a part of them only (`mscale_all_dim`)."""
    if not isinstance(scaling, YarnRope) or scaling.mscale_all_dim is None:
        return 1.0
    return temperature(scaling.factor, scaling.mscale_all_dim)


def temperature(factor: float, scale: float = 1.0) -> float:
    """Factor of queries and of keys where positions are stretched by `factor`; `scale`: `mscale`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
