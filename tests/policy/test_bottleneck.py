"""Bottleneck adapters on ranks: log-probs, gradients and samples of a float64 model with forward hooks at any layout; at the start they are the base."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.model.bottleneck import BottleneckMap, check_bottleneck
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.policy.store import write_adapter_config
from nemo_rl_like.spec.policy import BottleneckSpec, LayoutSpec, PolicySpec, RecomputeSpec
from tests.model import tiny
from tests.policy.ranks import export_adapter, run_ranks
from tests.policy.test_laws import make_batch, make_folder
from tests.policy.test_lora_laws import Folders, by_peft, each, largest, steps
from tests.policy.virtual_ranks import Found, check_samples, one_rank, sampled

HOULSBY = BottleneckSpec(width=5, activation="gelu", scale=0.7)
PFEIFFER = BottleneckSpec(placement="pfeiffer", reduction=4, activation="silu")
PARALLEL = BottleneckSpec(placement="parallel", width=6, activation="tanh", scale=4.0)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x * x.sigmoid(),
    "tanh": torch.tanh,
}
SOME_RANKS = (LayoutSpec(tp=2, sp=True), LayoutSpec(pp=2, vpp=2))
MORE_RANKS = (LayoutSpec(tp=2), LayoutSpec(cp=2), LayoutSpec(dp=2), LayoutSpec(pp=2))
EXPERT_RANKS = (LayoutSpec(dp=2, ep=2), LayoutSpec(tp=2, sp=True))
MLP = RecomputeSpec(kind="selective", modules=("mlp",))


def make(root: Path, base: Path, spec: BottleneckSpec) -> Folders:
    """Random adapters of the base as a checkpoint's section, and as an export."""
    config = ModelConfig.from_hf_folder(base)
    torch.manual_seed(4)
    drawn = {name: 0.2 * torch.randn(shape) for name, shape in BottleneckMap(config, spec).hf_shapes().items()}
    (root / "checkpoint" / ADAPTER).mkdir(parents=True)
    save_file(drawn, root / "checkpoint" / ADAPTER / "model.safetensors")
    write_adapter_config(root / "checkpoint" / ADAPTER / "adapter_config.json", spec, config, base)
    (root / "checkpoint" / "weights").mkdir()
    export_adapter(root / "checkpoint", root / "export")
    return Folders(base, root / "export", root / "checkpoint")


def hooked(folders: Folders) -> tuple[Any, dict[str, Tensor]]:
    """transformers' model in float64 that computes with the exported adapters, and those by name; nothing but the files is read."""
    said = json.loads((folders.peft / "adapter_config.json").read_text())
    files = load_file(folders.peft / "adapter_model.safetensors")
    leaves = {name: tensor.double().requires_grad_() for name, tensor in files.items()}
    eager = {"experts_implementation": "eager"}
    model = (
        AutoModelForCausalLM.from_pretrained(folders.base, dtype=torch.float64, **eager).eval().requires_grad_(False)
    )

    def added(block: str, x: Tensor) -> Tensor:
        part = {
            name: leaves[f"{block}.bottleneck.{name}"] for name in ("down.weight", "down.bias", "up.weight", "up.bias")
        }
        inner = FUNCTIONS[said["activation"]](functional.linear(x, part["down.weight"], part["down.bias"]))
        return said["scale"] * functional.linear(inner, part["up.weight"], part["up.bias"])

    for i, layer in enumerate(model.model.layers):
        mlp, attention = f"model.layers.{i}.mlp", f"model.layers.{i}.self_attn"
        if said["placement"] == "parallel":
            layer.mlp.register_forward_hook(lambda _, inputs, out, block=mlp: out + added(block, inputs[0]))
        else:
            layer.mlp.register_forward_hook(lambda _, inputs, out, block=mlp: out + added(block, out))
        if said["placement"] == "houlsby":
            layer.self_attn.register_forward_hook(
                lambda _, inputs, out, block=attention: (out[0] + added(block, out[0]), *out[1:])
            )
    return model, leaves


def check(made: list[dict[str, Any]], folders: Folders) -> None:
    batch = make_batch()
    model, leaves = hooked(folders)
    flat, loss, _ = by_peft(model, batch)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    base = AutoModelForCausalLM.from_pretrained(folders.base, dtype=torch.float32)
    weights = {
        n: t for n, t in base.state_dict().items() if n != "lm_head.weight" or not base.config.tie_word_embeddings
    }
    assert len(gradients) == len(leaves)
    for got in made:
        assert torch.equal(got["start"], got["base"]) and torch.equal(got["base again"], got["base"])
        assert largest(got["drawn"], made[0]["drawn"]) == 0
        assert all(bool(t.any()) == name.endswith("down.weight") for name, t in got["drawn"].items())
        assert float((got["log-probs"] - flat).abs().max()) <= 1e-5 < float((got["base"] - flat).abs().max())
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert got["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert largest(got["gradients"], gradients) <= 1e-5
        assert largest(got["merged"], tiny.as_on_disk(weights, base.config.model_type)) == 0
        assert got["again"][0] == got["again"][1]
        assert float((got["after"] - made[0]["after"]).abs().max()) <= 1e-4


@pytest.mark.slow
def test_houlsbys_adapters_are_those_of_float64_for_any_rows(tmp_path: Path) -> None:
    folders = make(tmp_path, make_folder(tmp_path / "base"), HOULSBY)
    policies = [
        PolicySpec(adapter=HOULSBY),
        PolicySpec(adapter=HOULSBY, rows="packed", micro_batch_tokens=24, recompute=MLP),
        PolicySpec(adapter=HOULSBY, rows="padded", micro_batch_tokens=60, recompute=RecomputeSpec()),
    ]
    found: Found = run_ranks(one_rank, 1, tmp_path, folders, policies)
    check(found[0], folders)
    check_samples(found[1], hooked(folders)[0])


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [SOME_RANKS, MORE_RANKS], ids=["some", "more"])
def test_adapters_are_those_of_float64_over_two_ranks(layouts: tuple[LayoutSpec, ...], tmp_path: Path) -> None:
    """The other places are told here, where tensor-parallel ranks have parts of the sequence."""
    base = make_folder(tmp_path / "base")
    cases = [
        (make(tmp_path / spec.placement, base, spec), [PolicySpec(layout=x, adapter=spec) for x in given])
        for spec, given in ((HOULSBY, layouts), (PFEIFFER, layouts[:1]), (PARALLEL, layouts[:1]))
    ]
    for (folders, _), made in zip(cases, run_ranks(each, 2, tmp_path, cases), strict=True):
        check(made, folders)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [HOULSBY, PARALLEL], ids=["houlsby", "parallel"])
def test_adapters_beside_experts_are_those_of_float64(spec: BottleneckSpec, tmp_path: Path) -> None:
    tiny.make_model("qwen3_moe").save_pretrained(tmp_path / "base")
    folders = make(tmp_path, tmp_path / "base", spec)
    check(run_ranks(steps, 1, tmp_path, folders, [PolicySpec(adapter=spec)]), folders)
    check(run_ranks(steps, 2, tmp_path, folders, [PolicySpec(layout=x, adapter=spec) for x in EXPERT_RANKS]), folders)


@pytest.mark.slow
def test_the_embedded_engine_samples_with_them_over_two_ranks(tmp_path: Path) -> None:
    folders = make(tmp_path, make_folder(tmp_path / "base"), PARALLEL)
    policy = PolicySpec(layout=LayoutSpec(tp=2, sp=True), adapter=PARALLEL)
    check_samples(run_ranks(sampled, 2, tmp_path, folders, policy), hooked(folders)[0])


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_hf_folder(make_folder(tmp_path))
    with pytest.raises(
        InputError, match=r"policy.adapter.reduction is 7, which does not divide the model's hidden_size"
    ):
        check_bottleneck(config, BottleneckSpec(reduction=7))
    with pytest.raises(InputError, match=r"policy.adapter.width is 4096, more than the model's hidden_size"):
        check_bottleneck(config, BottleneckSpec(width=4096))
    with pytest.raises(ValidationError, match="`reduction` and `width` both give the adapter's size"):
        BottleneckSpec(reduction=4, width=8)
    for spec in (HOULSBY, PFEIFFER, BottleneckSpec()):  # a run's folder has every field
        assert BottleneckSpec.model_validate(spec.model_dump()) == spec
