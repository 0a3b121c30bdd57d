"""What `policy.fp8` does not go with, told when the spec is read."""

from __future__ import annotations

from nemo_rl_like.spec.policy import OffloadSpec, PolicySpec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.stage import StageBase

_ELSE = "leave one of them out"


def fp8_problem(policy: PolicySpec, dtype: str) -> str | None:
    """What of the model or of the policy block does not go with it, with the fix; None if nothing."""
    fp8 = policy.fp8
    if fp8 is None:
        return None
    if dtype != "bfloat16":
        return f"`policy.fp8` needs `model.dtype: bfloat16`, which is {dtype}; change one of them"
    if not fp8.parameters:
        return None
    if policy.lora is not None:
        return f"`policy.fp8.parameters` keeps weights in FP8, and `policy.lora` adds adapters to 16-bit ones; {_ELSE}"
    if policy.offload != OffloadSpec():
        return f"`policy.fp8.parameters` has weights that `policy.offload` cannot move; {_ELSE}"
    return None


def stage_problem(policy: PolicySpec, stage: StageBase) -> str | None:
    """What of a stage does not go with it, with the fix; None if nothing."""
    kept = policy.fp8 is not None and policy.fp8.parameters
    if kept and isinstance(stage, PreferenceStageSpec) and stage.reference_sync is not None:
        return (
            f"moves its reference (`reference_sync`) by less than the FP8 of `policy.fp8.parameters` can tell; {_ELSE}"
        )
    return None
