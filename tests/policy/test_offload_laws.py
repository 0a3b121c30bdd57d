"""What lies in host memory changes no number: steps, checkpoints and log-probs are the same bits, and the device keeps none of it.

A CPU is device and host at once; copies between the two are made all the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec, ParameterGroup, SgdOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from tests.model.tiny import make_model
from tests.policy.optimizer_ranks import AFTER, Case, member, saved, state, train, weights
from tests.policy.ranks import context_of, run_ranks
from tests.policy.test_laws import VOCAB, make_batch
from tests.tiny_folders import save_biased_qwen2

GROUPS = (ParameterGroup(match="*.embed_tokens.weight", lr_scale=0.5, weight_decay=0.3),)
SHARED: dict[str, Any] = {
    "schedule": "linear",
    "warmup_steps": 1,
    "weight_decay": 0.2,
    "clip_grad": 0.1,
    "groups": GROUPS,
}
ADAMW: OptimizerSpec = AdamWOptimizer(lr=1e-2, eps=1e-4, betas=(0.8, 0.95), **SHARED)
SGD: OptimizerSpec = SgdOptimizer(lr=0.1, momentum=0.7, **SHARED)
CASES = ("float32 adamw dp2", "bfloat16 adamw dp2", "bfloat16 sgd tp2", "bfloat16 adamw experts ep2")


def resumed(this: PolicyRank, root: Path) -> tuple[Any, Any]:
    """The optimizer's state after a load, and the weights after two more steps."""
    this.load(str(root / f"step_{AFTER}"), AFTER)
    then = state(this)
    train(this, AFTER)
    return then, weights(this)


def bookkeeping(this: PolicyRank) -> dict[str, int]:
    """Elements that this rank owns, bytes of the host, and bytes of the device beside parameters and gradients."""
    optimizer = this.backend.optimizer  # type: ignore[attr-defined]
    ours = {p.untyped_storage().data_ptr() for p in this.model.parameters()}
    mains = [main for part in optimizer._parts for group in part.optimizer.param_groups for main in group["params"]]
    storages = {main.untyped_storage().data_ptr(): main.untyped_storage().nbytes() for main in mains}
    return {
        "slices": len(mains),
        "owned": sum(main.numel() for main in mains),
        "host": optimizer.host_bytes,
        "device": sum(size for place, size in storages.items() if place not in ours),
    }


def both(rank: int, world: int, port: int, cases: list[Case], roots: list[Path]) -> list[dict[str, Any]]:
    """Every case on the device and on the host: checkpoint, steps, and each resumed from the other's checkpoint."""
    found = []
    for case, root in zip(cases, roots, strict=True):
        hosted = replace(case, on_host=True)
        paths = [root / "device", root / "host"]
        ready = (rank, world, port)
        (device, host) = saved(*ready, [case, hosted], paths)
        this = member(*ready, hosted)
        crossed = [resumed(member(*ready, case), paths[1]), resumed(this, paths[0])]
        found.append({"device": device, "host": host, "crossed": crossed, "bytes": bookkeeping(this)})
    return found


def frozen(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    """Log-probs of a model on the device and of one on the host, and where the latter's weights are."""
    layout = LayoutSpec(tp=2)
    found: dict[str, Any] = {}
    for on_host in (False, True):
        place = context_of(layout, rank, world, port)
        this = PolicyRank(place, folder=str(folder), policy=PolicySpec(layout=layout), dtype="float32", on_host=on_host)
        places = [[p.data_ptr() for p in this.model.parameters()]]
        hook = this.model.first.register_forward_pre_hook(
            lambda model, inputs, places=places: places.append([p.data_ptr() for p in model.parameters()])
        )
        found["host" if on_host else "device"] = this.score([row.tolist() for row in make_batch().tokens.split(5)])
        hook.remove()
        found["places"] = [*places, [p.data_ptr() for p in this.model.parameters()]]
        try:
            this.start_training(ADAMW, 1)
        except RuntimeError as error:
            found["refused"] = str(error)
    return found


def everything(rank: int, world: int, port: int, cases: list[Case], roots: list[Path], folder: Path) -> dict[str, Any]:
    """All laws in one start of two ranks."""
    return {"both": both(rank, world, port, cases, roots), "frozen": frozen(rank, world, port, folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found."""
    folder = save_biased_qwen2(tmp_path_factory.mktemp("model"), VOCAB)
    mixture = tmp_path_factory.mktemp("mixture")
    make_model("qwen3_moe").save_pretrained(mixture)
    cases = [
        Case(folder, ADAMW, LayoutSpec(dp=2)),
        Case(folder, ADAMW, LayoutSpec(dp=2), "bfloat16"),
        Case(folder, SGD, LayoutSpec(tp=2), "bfloat16"),
        Case(mixture, ADAMW, LayoutSpec(dp=2, ep=2), "bfloat16"),
    ]
    roots = [tmp_path_factory.mktemp("root") for _ in cases]
    where = tmp_path_factory.mktemp("ranks")
    made: dict[str, Any] = run_ranks(everything, 2, where, cases, roots, folder)
    return made


@pytest.mark.parametrize("case", CASES)
def test_steps_with_the_optimizer_on_the_host_are_the_same_bits(found: dict[str, Any], case: str) -> None:
    one = found["both"][CASES.index(case)]
    for device, host in zip(
        one["device"], one["host"], strict=True
    ):  # the state at the checkpoint, the weights after it
        same(device, host)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_one_goes_on_as_the_other(found: dict[str, Any], case: str) -> None:
    one = found["both"][CASES.index(case)]
    for then, after in one["crossed"]:
        same(then, one["device"][0])
        same(after, one["device"][1])


@pytest.mark.parametrize("case", CASES)
def test_the_device_keeps_nothing_of_the_optimizer(found: dict[str, Any], case: str) -> None:
    """float32 models have no master copies: their slices are the parameters' own memory."""
    counted = found["both"][CASES.index(case)]["bytes"]
    assert counted["device"] <= 4 * counted["slices"]
    kinds, rounded = 1 if "sgd" in case else 2, 0 if "float32" in case else 2
    assert counted["host"] == counted["owned"] * (4 + 4 + rounded + 4 * kinds)


def test_a_frozen_model_on_the_host_gives_the_same_log_probs_from_copies_that_last_a_pass(
    found: dict[str, Any],
) -> None:
    one = found["frozen"]
    assert one["host"] == one["device"]
    before, inside, *_, after = one["places"]
    assert before == after
    assert not set(before) & set(inside)
    assert "is not trained" in one["refused"]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Equal names and bits."""
    assert left.keys() == right.keys() and left
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    assert any(bool(tensor.any()) for tensor in left.values())
