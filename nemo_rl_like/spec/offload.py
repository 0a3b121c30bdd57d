"""What `policy.offload` does not go with, told when the spec is read."""

from __future__ import annotations

from nemo_rl_like.spec.backend import TRAINING
from nemo_rl_like.spec.policy import OffloadSpec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.stage import StageBase

MUON_ON_HOST = (
    "`policy.offload.optimizer` keeps adamw and sgd in host memory, and `optimizer.kind` is muon, whose matrices are orthogonalised on the "
    "device; leave one of them out"
)


def offload_problem(offload: OffloadSpec, stage: StageBase) -> str | None:
    """What of a stage does not go with it, with the fix; None if nothing."""
    if offload.optimizer and _has_muon(stage):
        return f"does not fit: {MUON_ON_HOST}"
    if not offload.frozen:
        return None
    if isinstance(stage, PreferenceStageSpec) and stage.reference_sync is not None:
        return "moves its reference (`reference_sync`), which `policy.offload.frozen` would keep in host memory; leave one of them out"
    if isinstance(stage, RlStageSpec) and stage.algorithm.opponent is not None:
        return "samples from its reference (`opponent`), which `policy.offload.frozen` would keep in host memory; leave one of them out"
    return None


def _has_muon(stage: StageBase) -> bool:
    """Of the policy, or of the critic."""
    if isinstance(stage, RlStageSpec) and stage.needs_critic and stage.critic_or_default.optimizer.kind == "muon":
        return True
    return isinstance(stage, TRAINING | RewardModelStageSpec) and stage.optimizer.kind == "muon"
