"""Adapters on experts: the log-probs, gradient and merged model of float64 at any layout, and files that PEFT loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.lora_map import AdapterMap
from nemo_rl_like.policy.store import write_adapter_config
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec, PolicySpec, RecomputeSpec
from tests.model import tiny
from tests.policy.ranks import run_ranks
from tests.policy.test_laws import make_batch
from tests.policy.test_lora_laws import Folders, largest, steps

LORA = LoraSpec(rank=3, alpha=4.0, rslora=True, targets=("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
MOE = RecomputeSpec(kind="selective", modules=("moe",))
TWO_RANKS = (
    LayoutSpec(dp=2, ep=2),
    LayoutSpec(tp=2, sp=True),
    LayoutSpec(tp=2, sp=True, etp=1),
    LayoutSpec(tp=2, sp=True, ep=2, etp=1),
    LayoutSpec(dp=2, etp=2),
)
MORE = (LayoutSpec(dp=2), LayoutSpec(pp=2), LayoutSpec(cp=2, ep=2))
FOUR_RANKS = (
    LayoutSpec(dp=2, tp=2, sp=True, ep=2),
    LayoutSpec(tp=2, sp=True, pp=2, ep=2, etp=1),
    LayoutSpec(cp=2, tp=2, sp=True, ep=2),
)


def make(root: Path, family: str) -> Folders:
    """A base, and random adapters under PEFT's names beside it."""
    base = root / "base"
    tiny.make_model(family).save_pretrained(base)
    config = ModelConfig.from_hf_folder(base)
    torch.manual_seed(4)
    drawn = {name: 0.2 * torch.randn(shape) for name, shape in AdapterMap(config, LORA).hf_shapes().items()}
    for folder, file in ((root / "peft", "adapter_model.safetensors"), (root / "c" / ADAPTER, "model.safetensors")):
        folder.mkdir(parents=True)
        save_file(drawn, folder / file)
    write_adapter_config(root / "peft" / "adapter_config.json", LORA, config, base)
    return Folders(base, root / "peft", root / "c")


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make(tmp_path_factory.mktemp("lora"), request.param)


def base_of(folders: Folders, dtype: torch.dtype) -> Any:
    """Whose experts compute one by one, as float64 needs it."""
    return AutoModelForCausalLM.from_pretrained(folders.base, dtype=dtype, experts_implementation="eager").eval()


def merged(folders: Folders, base: Any, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of transformers' model with scale B A added to each matrix, expert by expert."""
    scale, found = LORA.alpha / LORA.rank**0.5, {}
    names = ModelConfig.from_hf_folder(folders.base).traits.experts
    assert names is not None

    def delta(module: str) -> Tensor:
        a, b = (adapters[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        return scale * b @ a

    for name, weight in base.named_parameters():
        if "self_attn" in name and f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight" in adapters:
            found[name] = weight.detach() + delta(name.removesuffix(".weight"))
        elif ".mlp.experts." in name:
            block = name.split(".mlp.")[0] + f".{names.block}.experts"
            parts = names.projections[:2] if name.endswith("gate_up_proj") else names.projections[2:]
            rows = [torch.cat([delta(f"{block}.{i}.{part}") for part in parts]) for i in range(len(weight))]
            found[name] = weight.detach() + torch.stack(rows)
    return found


def by_float64(folders: Folders) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Log-probs [N], loss, and gradients of the adapters by name, row by row."""
    model, batch = base_of(folders, torch.float64), make_batch()
    leaves = {n: t.double().requires_grad_() for n, t in load_file(folders.peft / "adapter_model.safetensors").items()}
    weights, flat = merged(folders, model, leaves), torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        ids, mask = batch.tokens[start:end], batch.loss_mask[start:end]
        table = functional_call(model, weights, (ids[None],)).logits[0, :-1].log_softmax(-1)
        said = torch.cat([table.new_zeros(1), table.gather(1, ids[1:, None])[:, 0]])
        flat[start:end] = torch.where(mask, said, 0.0).detach()
        total = total - said[mask].sum() / int(batch.loss_mask.sum())
    total.backward()
    return flat, float(total.detach()), {n: t.grad for n, t in leaves.items() if t.grad is not None}


def check(made: list[dict[str, Any]], folders: Folders) -> None:
    flat, loss, gradients = by_float64(folders)
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    base = base_of(folders, torch.float32)
    family = base.config.model_type
    with torch.no_grad():
        whole = {**base.state_dict(), **merged(folders, base, load_file(folders.peft / "adapter_model.safetensors"))}
    assert len(gradients) == len(AdapterMap(ModelConfig.from_hf_folder(folders.base), LORA).hf_shapes())
    for got in made:
        assert torch.equal(got["start"], got["base"]) and torch.equal(got["base again"], got["base"])
        assert largest(got["start merged"], tiny.as_on_disk(base.state_dict(), family)) == 0
        assert largest(got["drawn"], made[0]["drawn"]) == 0
        assert float((got["log-probs"] - flat).abs().max()) <= 1e-5
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert got["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert largest(got["gradients"], gradients) <= 1e-5
        assert largest(got["merged"], tiny.as_on_disk(whole, family)) <= 1e-6
        assert got["again"][0] == got["again"][1]


def test_experts_adapters_are_those_of_float64_for_any_rows(folders: Folders, tmp_path: Path) -> None:
    policies = [PolicySpec(lora=LORA), PolicySpec(lora=LORA, rows="packed", micro_batch_tokens=24, recompute=MOE)]
    made = run_ranks(steps, 1, tmp_path, folders, policies)
    check(made, folders)
    written = made[0]["folder"] / ADAPTER
    said = json.loads((written / "adapter_config.json").read_text())
    assert said["lora_alpha"] == pytest.approx(LORA.alpha * LORA.rank**0.5) and not said["use_rslora"]


def test_experts_adapters_are_those_of_float64_over_two_ranks(folders: Folders, tmp_path: Path) -> None:
    check(run_ranks(steps, 2, tmp_path, folders, [PolicySpec(layout=x, lora=LORA) for x in TWO_RANKS]), folders)


@pytest.mark.slow
def test_experts_adapters_are_those_of_float64_in_more_layouts(folders: Folders, tmp_path: Path) -> None:
    heads = ModelConfig.from_hf_folder(folders.base).kv_heads
    for ranks, layouts in ((2, MORE), (4, FOUR_RANKS)):
        fitting = [PolicySpec(layout=x, lora=LORA) for x in layouts if heads % (x.tp * x.cp) == 0]
        check(run_ranks(steps, ranks, tmp_path, folders, fitting), folders)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_peft_loads_them_as_the_merged_model(family: str, tmp_path: Path) -> None:
    folders = make(tmp_path, family)
    adapters, ids = load_file(folders.peft / "adapter_model.safetensors"), make_batch().tokens[None, :20]
    base = base_of(folders, torch.float64)
    want = functional_call(
        base, merged(folders, base, {n: t.double() for n, t in adapters.items()}), (ids,)
    ).logits.detach()
    plain = base(ids).logits.detach()
    adapted = PeftModel.from_pretrained(base_of(folders, torch.float32), folders.peft).double()
    got = adapted(ids).logits.detach()
    assert float((got - want).abs().max()) <= 1e-5 and float((plain - want).abs().max()) > 0.1
