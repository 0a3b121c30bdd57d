"""What `policy.backend: fsdp` does not do, told when the spec is read: the field, and what to set instead."""

from __future__ import annotations

from nemo_rl_like.spec.distill import DistillStageSpec
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.evaluate import EvaluateStageSpec
from nemo_rl_like.spec.policy import OffloadSpec, PolicySpec, RouterSpec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.pretrain import PretrainStageSpec
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.spec.sft import SftStageSpec
from nemo_rl_like.spec.stage import StageBase

EMBEDDED = (
    "`engine.kind: embedded` decodes on Megatron's layers, which `policy.backend: fsdp` does not have; set `engine.kind: vllm`, or "
    "`policy.backend: megatron`"
)
TRAINING = PretrainStageSpec | SftStageSpec | RlStageSpec | PreferenceStageSpec | DistillStageSpec
_ELSE = "leave it out, or set `policy.backend: megatron`"


def policy_problem(policy: PolicySpec) -> str | None:
    """What of the policy block `fsdp` lacks; None if nothing."""
    layout = policy.layout
    sizes = {
        "tp": layout.tp,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp or 1,
    }
    for name, size in sizes.items():
        if size > 1:
            return (
                f"`policy.layout.{name}` is {size}, and `policy.backend: fsdp` shards over `dp` ranks alone; set `{name}: 1` and raise `dp`, "
                "or set `policy.backend: megatron`"
            )
    asked = {
        "fp8": policy.fp8 is not None,
        "lora": policy.lora is not None,
        "router": policy.router != RouterSpec(),
        "offload": policy.offload != OffloadSpec(),
        "recompute.modules": policy.recompute is not None and policy.recompute.kind == "selective",
    }
    for name, given in asked.items():
        if given:
            return f"`policy.{name}` is given, which `policy.backend: fsdp` does not have; {_ELSE}"
    return None


def stage_problem(stage: StageBase, engine: EngineSpec) -> str | None:
    """What of a stage `fsdp` lacks; None if nothing."""
    if isinstance(stage, RewardModelStageSpec):
        return "trains a score head, which `policy.backend: fsdp` does not have; set `policy.backend: megatron`"
    if isinstance(stage, RlStageSpec):
        found = _rl_problem(stage)
        if found is not None:
            return found
    if isinstance(stage, TRAINING) and stage.optimizer.kind == "muon":
        return "has `optimizer.kind: muon`, which needs whole matrices; use adamw or sgd, or set `policy.backend: megatron`"
    samples = isinstance(stage, RlStageSpec | SampleStageSpec | EvaluateStageSpec) or (
        isinstance(stage, DistillStageSpec) and stage.sampled_per_step > 0
    )
    if samples and engine.kind == "embedded":
        return f"samples, but {EMBEDDED}"
    return None


def _rl_problem(stage: RlStageSpec) -> str | None:
    scored = {"critic": stage.needs_critic, "reward_model": stage.reward_model is not None}
    for name, asked in scored.items():
        if asked:
            return f"has a {name} (a model with a score head), which `policy.backend: fsdp` does not have; set `policy.backend: megatron`"
    if stage.algorithm.opponent is not None:
        return (
            "has an `opponent`, which the embedded engine decodes on Megatron's layers; set `policy.backend: megatron`"
        )
    return None
