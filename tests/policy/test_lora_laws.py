"""Adapters on ranks: PEFT's own log-probs, gradient and files at any layout; at the start they are the base, and merged they are themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.model.lora import adapters_off
from nemo_rl_like.policy.rank import PolicyRank, Walk
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec, PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.model import tiny
from tests.policy.ranks import context_of, run_ranks, save_checkpoint, state_of
from tests.policy.test_laws import BETA1, make_batch, make_folder

ALL = LoraSpec(rank=4, alpha=6.0)
SOME = LoraSpec(rank=3, alpha=2.0, rslora=True, targets=("v_proj", "q_proj", "up_proj", "down_proj"))
DORA = LoraSpec(rank=3, alpha=4.0, dora=True, targets=("v_proj", "q_proj", "o_proj", "up_proj", "down_proj"))
SECTIONS = ("weights", ADAPTER, "optimizer")
KINDS = ("shared_prefix", "packed", "padded")
LAYOUTS = (
    LayoutSpec(dp=2),
    LayoutSpec(tp=2),
    LayoutSpec(pp=2),
    LayoutSpec(pp=2, vpp=2),
    LayoutSpec(tp=2, sp=True),
    LayoutSpec(cp=2),
)


@dataclass(frozen=True)
class Folders:
    """The base, PEFT's adapters in its own file, and the same as a checkpoint's section."""

    base: Path
    peft: Path
    checkpoint: Path


def peft_of(folders: Folders, dtype: torch.dtype = torch.float64) -> PeftModel:
    base = tiny.hugging_face(folders.base, torch.float32).eval()
    return PeftModel.from_pretrained(base, folders.peft, is_trainable=True).to(dtype).eval()


def on_disk(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Its weights under the names of files."""
    tied = model.config.tie_word_embeddings
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    return tiny.as_on_disk(weights, model.config.model_type)


def make(root: Path, lora: LoraSpec) -> Folders:
    """A base, and `make_adapters` of it."""
    return make_adapters(root, make_folder(root / "base"), lora)


def make_adapters(
    root: Path, base: Path, lora: LoraSpec, std: float = 0.2, parameters: list[str] | None = None
) -> Folders:
    """Random adapters, B among them, written by PEFT; `parameters`, with `.experts.`, are targets in the place of projections' names."""
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.rslora, use_dora=lora.dora, target_modules=[x for x in lora.targets if not any(y.endswith(x) for y in parameters or ())],
        target_parameters=parameters, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(tiny.hugging_face(base, torch.float32), config)
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            drawn = torch.empty_like(parameter).normal_(std=std)
            parameter.data = parameter + drawn if "magnitude" in name else drawn
    model.save_pretrained(root / "peft")
    (root / "checkpoint" / ADAPTER).mkdir(parents=True)
    written = as_ours(load_file(root / "peft" / "adapter_model.safetensors"), model.config.hidden_size)
    save_file(written, root / "checkpoint" / ADAPTER / "model.safetensors")
    return Folders(base, root / "peft", root / "checkpoint")


def as_ours(tensors: dict[str, torch.Tensor], hidden: int) -> dict[str, torch.Tensor]:
    """Adapters of stacked experts, four of them, by expert under the name of their tensor, which is told by what they read."""
    found = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            found[name] = tensor
            continue
        block, part = name.replace(".base_layer", "").split(".lora_")
        inputs = tensors[name.replace(".lora_B.", ".lora_A.")].shape[1]
        target = "gate_up_proj" if inputs == hidden else "down_proj"
        by_expert = (
            tensor.unflatten(0, (4, -1)) if part.startswith("A") else tensor.unflatten(1, (-1, 4)).permute(2, 0, 1)
        )
        found[f"{block}.{target}.lora_{part}"] = by_expert.contiguous()
    return found


@pytest.fixture(
    scope="module",
    params=[ALL, pytest.param(SOME, marks=pytest.mark.slow), DORA],
    ids=["all", "some", "dora"],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Folders, LoraSpec]:
    return make(tmp_path_factory.mktemp("lora"), request.param), request.param


def member(rank: int, world: int, port: int, folders: Folders, policy: PolicySpec) -> PolicyRank:
    place = context_of(policy.layout, rank, world, port)
    made = PolicyRank(place, folder=str(folders.base), policy=policy, dtype="float32", adapter_seed=5)
    made.start_training(AdamWOptimizer(lr=1e-2, clip_grad=0.0, betas=(BETA1, 0.999), weight_decay=0.1), 10)
    return made


def log_probs(of: PolicyRank, batch: TokenBatch) -> torch.Tensor:
    return of._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False).logprobs


def tensors(of: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in of if tensor is not None}


def saved(this: PolicyRank, root: Path) -> Path:
    """A whole checkpoint of what it holds after one step."""
    return save_checkpoint(this, root, 1, SECTIONS)


def steps(rank: int, world: int, port: int, folders: Folders, policies: list[PolicySpec]) -> list[dict[str, Any]]:
    """What each layout finds at the start, with PEFT's adapters, in one step, and after saving it and loading it into new ranks."""
    out = []
    for policy in policies:
        this, batch = member(rank, world, port, folders, policy), make_batch()
        found: dict[str, Any] = {"start": log_probs(this, batch), "start merged": tensors(this.backend.store.weights())}
        found["drawn"] = tensors(this.backend.store.trained.iter_hf(this.model))
        with adapters_off(this.model):
            found["base"] = log_probs(this, batch)
        this.load(str(folders.checkpoint), None)
        with adapters_off(this.model):
            found["base again"] = log_probs(this, batch)
        found |= {"log-probs": log_probs(this, batch), "merged": tensors(this.backend.store.weights())}
        found["metrics"] = this.train_step(batch, None, CrossEntropy())
        moments = state_of(this)
        found["gradients"] = {
            k.removeprefix("exp_avg/"): v / (1 - BETA1) for k, v in moments.items() if k.startswith("exp_avg/")
        }
        folder = saved(this, folders.checkpoint.parent / f"saved-{port}-{len(out)}")
        other = member(rank, world, port, folders, policy)
        other.load(str(folder), 1)
        found["again"] = [{**one.train_step(batch, None, CrossEntropy())} for one in (this, other)]
        found |= {"after": log_probs(other, batch), "folder": folder}
        out.append(found)
    return out  # fmt: skip


def each(rank: int, world: int, port: int, cases: list[tuple[Folders, list[PolicySpec]]]) -> list[list[dict[str, Any]]]:
    """What `steps` finds with each case's policies."""
    return [steps(rank, world, port, folders, policies) for folders, policies in cases]


def by_peft(model: torch.nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Log-probs [N], loss, and gradients by name, row by row."""
    flat = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), int(batch.loss_mask.sum())
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        ids = batch.tokens[start:end]
        table = model(ids[None]).logits[0, :-1].log_softmax(-1)
        for t in range(1, end - start):
            if batch.loss_mask[start + t]:
                flat[start + t] = table[t - 1, ids[t]].detach()
                total = total - table[t - 1, ids[t]] / count
    total.backward()
    named = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    named = {n.replace("magnitude_vector.weight", "magnitude_vector"): g for n, g in named.items()}  # its name in files
    return flat, float(total.detach()), named


def largest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def check(made: list[dict[str, Any]], case: tuple[Folders, LoraSpec]) -> None:
    folders, lora = case
    batch = make_batch()
    flat, loss, gradients = by_peft(peft_of(folders), batch)
    model = tiny.hugging_face(folders.base, torch.float32)
    gradients, base = as_ours(gradients, model.config.hidden_size), on_disk(model)
    merged = on_disk(peft_of(folders, torch.float32).merge_and_unload())
    norm = sum(float((g**2).sum()) for g in gradients.values()) ** 0.5
    for got in made:
        assert torch.equal(got["start"], got["base"]) and torch.equal(got["base again"], got["base"])
        assert largest(got["start merged"], base) == 0
        assert largest(got["drawn"], made[0]["drawn"]) == 0
        assert float((got["log-probs"] - flat).abs().max()) <= 1e-5
        assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert got["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert largest(got["gradients"], gradients) <= 1e-5
        assert largest(got["merged"], merged) <= 1e-6
        assert got["again"][0] == got["again"][1]
        assert float((got["after"] - made[0]["after"]).abs().max()) <= 1e-4
        description = json.loads((got["folder"] / ADAPTER / "adapter_config.json").read_text())
        assert (description["r"], description["lora_alpha"]) == (lora.rank, lora.alpha)
        for section in SECTIONS:
            assert list((got["folder"] / section).glob("*.safetensors")), section


def test_adapters_are_pefts_for_any_rows(case: tuple[Folders, LoraSpec], tmp_path: Path) -> None:
    policies = [
        PolicySpec(rows=kind, micro_batch_tokens=budget, lora=case[1]) for kind in KINDS for budget in (4096, 24)
    ]
    check(run_ranks(steps, 1, tmp_path, case[0], policies), case)


def test_adapters_are_pefts_over_two_ranks(case: tuple[Folders, LoraSpec], tmp_path: Path) -> None:
    check(run_ranks(steps, 2, tmp_path, case[0], [PolicySpec(layout=x, lora=case[1]) for x in LAYOUTS]), case)


@pytest.mark.slow
def test_adapters_are_pefts_over_two_by_two_ranks(case: tuple[Folders, LoraSpec], tmp_path: Path) -> None:
    check(run_ranks(steps, 4, tmp_path, case[0], [PolicySpec(layout=LayoutSpec(tp=2, pp=2), lora=case[1])]), case)
