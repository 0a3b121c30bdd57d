"""Every optimizer is PyTorch's on the whole Hugging Face model in float64, at any layout, with groups, and across checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_like.spec.optimizer import (
    AdamWOptimizer,
    AdamWRest,
    MuonOptimizer,
    OptimizerBase,
    OptimizerSpec,
    ParameterGroup,
    SgdOptimizer,
)
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec
from tests.model.tiny import make_model
from tests.policy.optimizer_ranks import TOTAL, Case, Tensors, one_rank, refused, trained, two_ranks
from tests.policy.ranks import run_ranks
from tests.policy.test_laws import VOCAB, make_batch
from tests.tiny_folders import save_biased_qwen2

DECAY, CLIP, STEPS = 0.2, 0.1, 3
GROUPS = (
    ParameterGroup(match="*.embed_tokens.weight", lr_scale=0.5, weight_decay=0.0),
    ParameterGroup(match="model.norm.weight", weight_decay=0.3),
    ParameterGroup(match="*.0.self_attn.?_proj.weight", lr_scale=2.0),
    ParameterGroup(match="model.layers.0.*", lr_scale=3.0),
)
SHARED: dict[str, Any] = {
    "schedule": "linear",
    "warmup_steps": 1,
    "weight_decay": DECAY,
    "clip_grad": CLIP,
    "groups": GROUPS,
}
ADAMW = AdamWOptimizer(lr=1e-2, min_lr=1e-3, eps=1e-4, **SHARED)
SGD = SgdOptimizer(lr=0.1, min_lr=0.01, **SHARED)
MUON = MuonOptimizer(
    lr=1e-2, min_lr=1e-3, ns_dtype="float32", adamw=AdamWRest(lr=5e-3, eps=1e-4, weight_decay=0.1), **SHARED
)
PLAIN_MUON = MUON.model_copy(update={"nesterov": False, "momentum": 0.8, "adamw": AdamWRest(eps=1e-4)})
BARE_MUON = MUON.model_copy(update={"groups": ()})
SPECS: dict[str, OptimizerSpec] = {"adamw": ADAMW, "sgd": SGD, "muon": MUON}
TWO = (LayoutSpec(dp=2), LayoutSpec(tp=2), LayoutSpec(pp=2), LayoutSpec(tp=2, sp=True))
FOUR = (LayoutSpec(tp=2, pp=2), LayoutSpec(dp=2, tp=2))
LOADS = (LayoutSpec(dp=2), LayoutSpec(pp=2))


def group_of(name: str) -> tuple[float, float | None]:
    """Scale of the learning rate, and weight decay (None: as usual), that GROUPS give a parameter; written out by hand."""
    if name == "model.embed_tokens.weight":
        return 0.5, 0.0
    if name == "model.norm.weight":
        return 1.0, 0.3
    if name.startswith("model.layers.0."):
        return (2.0 if "self_attn" in name and name.endswith("_proj.weight") else 3.0), None
    return 1.0, None


def no_groups(name: str) -> tuple[float, float | None]:
    """As if the spec had none."""
    return 1.0, None


def orthogonal(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz as the paper writes it, without any regard to cost."""
    x = x / x.norm()
    for _ in range(steps):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x


class MuonByHand(torch.optim.Optimizer):
    """The paper's update of whole matrices."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            share = group["momentum"]
            for p in group["params"]:
                state = self.state[p]
                state["m"] = share * state.get("m", torch.zeros_like(p)) + p.grad
                way = p.grad + share * state["m"] if group["nesterov"] else state["m"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * 0.2 * max(p.shape) ** 0.5 * orthogonal(way))


def by_torch(
    folder: Path,
    spec: OptimizerSpec,
    group_of: Callable[[str], tuple[float, float | None]] = group_of,
    decays: Callable[[str], bool] = lambda name: not name.endswith(("bias", "norm.weight")),
) -> tuple[Tensors, list[float]]:
    """Weights after STEPS steps, and the gradient norms before clipping, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    muon, rest = [], []
    for name, parameter in model.named_parameters():
        hidden = isinstance(spec, MuonOptimizer) and name.startswith("model.layers.") and name.endswith("_proj.weight")
        usual = spec.adamw if isinstance(spec, MuonOptimizer) and not hidden else spec
        scale, decay = group_of(name)
        if decay is None:
            own = spec.weight_decay if usual.weight_decay is None else usual.weight_decay
            decay = own if decays(name) else 0.0
        peak = (spec.lr if usual.lr is None else usual.lr) * scale
        one = {"params": [parameter], "lr": peak, "peak": peak, "weight_decay": decay}
        (muon if hidden else rest).append(one)
    optimizers: list[torch.optim.Optimizer] = []
    if isinstance(spec, SgdOptimizer):
        optimizers.append(torch.optim.SGD(rest, momentum=spec.momentum))
    else:
        adam = spec.adamw if isinstance(spec, MuonOptimizer) else spec
        optimizers.append(torch.optim.AdamW(rest, betas=adam.betas, eps=adam.eps))
    if isinstance(spec, MuonOptimizer):
        optimizers.append(MuonByHand(muon, {"momentum": spec.momentum, "nesterov": spec.nesterov}))
    norms = []
    for k in range(1, STEPS + 1):
        left = 1 - max(0, k - spec.warmup_steps) / (TOTAL + 1 - spec.warmup_steps)
        low = spec.min_lr / spec.lr
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * (low + (1 - low) * left)
        loss_of(model).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_grad)))
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def loss_of(model: Any) -> torch.Tensor:
    """Mean cross-entropy over the batch's trained tokens, row by row."""
    batch = make_batch()
    cuts = batch.cu_seqlens.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(cuts, cuts[1:], strict=False):
        ids, mask = batch.tokens[start:end], batch.loss_mask[start + 1 : end]
        table = model(ids[None]).logits[0, :-1].log_softmax(-1)
        total = total - table.gather(1, ids[1:, None])[:, 0][mask].sum()
    return total / int(batch.loss_mask.sum())


def apart(left: Tensors, right: Tensors) -> float:
    """The largest difference of two sets of tensors of the same names."""
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied model with biases, whose vocabulary two ranks must pad, and whose every weight matters."""
    made = save_biased_qwen2(tmp_path_factory.mktemp("model"), VOCAB)
    model = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(7)
            elif name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts."""
    made = tmp_path_factory.mktemp("mixture")
    make_model("qwen3_moe").save_pretrained(made)
    return made


def further(folder: Path, mixture: Path, layouts: tuple[LayoutSpec, LayoutSpec]) -> list[Case]:
    """Muon of adapters, and of experts."""
    lora = LoraSpec(rank=4)
    return [Case(folder, BARE_MUON, layouts[0], lora=lora), Case(mixture, BARE_MUON, layouts[1])]


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, tuple[Tensors, list[float]]]:
    return {name: by_torch(folder, spec) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Where each optimizer's checkpoint is written, and last that of a bfloat16 model."""
    return [tmp_path_factory.mktemp("root") / "checkpoints" for _ in (*SPECS, "bfloat16")]


def half(folder: Path, layout: LayoutSpec) -> Case:
    """Muon on a bfloat16 model, which has master copies."""
    return Case(folder, MUON, layout, "bfloat16")


@pytest.fixture(scope="module")
def pair(folder: Path, mixture: Path, roots: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found for every law."""
    cases = [Case(folder, spec, layout) for spec in SPECS.values() for layout in TWO]
    saves = [*(Case(folder, spec, LayoutSpec(tp=2)) for spec in SPECS.values()), half(folder, LayoutSpec(tp=2))]
    loads = [Case(folder, spec, layout) for spec in SPECS.values() for layout in LOADS]
    loads += [half(folder, layout) for layout in LOADS]
    more = [*further(folder, mixture, (LayoutSpec(tp=2), LayoutSpec(dp=2, ep=2)))]
    more += further(folder, mixture, (LayoutSpec(dp=2), LayoutSpec(tp=2, sp=True)))
    where = tmp_path_factory.mktemp("two")
    found: dict[str, Any] = run_ranks(two_ranks, 2, where, cases, more, saves, loads, roots)
    return found


@pytest.fixture(scope="module")
def alone(
    folder: Path, mixture: Path, roots: list[Path], pair: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one rank found for every law; it loads what two have saved."""
    cases = [Case(folder, spec) for spec in (*SPECS.values(), PLAIN_MUON)]
    loads = [*cases[:3], half(folder, LayoutSpec())]
    bad: list[tuple[Case, Path | None]] = [(cases[0], roots[1]), (cases[1], roots[2]), (cases[2], roots[0])]
    bad += [(Case(folder, AdamWOptimizer(groups=groups)), None) for groups in (NOTHING, SHADOWED, CUT)]
    more, where = further(folder, mixture, (LayoutSpec(), LayoutSpec())), tmp_path_factory.mktemp("one")
    found: dict[str, Any] = run_ranks(one_rank, 1, where, cases, more, loads, roots, bad, SCHEDULES)
    return found


NOTHING = (ParameterGroup(match="*.embed.weight"),)
SHADOWED = (ParameterGroup(match="*norm*"), ParameterGroup(match="model.norm.*"))
CUT = (ParameterGroup(match="*.q_proj.weight", lr_scale=0.5),)
NAMES = ("constant", "linear", "cosine", "wsd")
SCHEDULES: list[OptimizerSpec] = [
    *(SgdOptimizer(lr=1e-4, min_lr=1e-5, warmup_steps=2, schedule=name) for name in NAMES),
    SgdOptimizer(lr=1e-4, min_lr=1e-5, warmup_steps=2, schedule="linear", decay_steps=6),
]


def rate(schedule: str, update: int, last: int) -> float:
    """Share of the way from `min_lr` to `lr`, after a warm-up of two updates; 0 just after the `last`."""
    end = last + 1
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        return min(1.0, (end - update) / round(0.2 * end))
    done = min(1.0, (update - 2) / (end - 2))
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def test_schedules_warm_up_and_fall_as_named(alone: dict[str, Any]) -> None:
    for found, (name, last) in zip(alone["rates"], (*((name, TOTAL) for name in NAMES), ("linear", 6)), strict=True):
        want = [5e-5, *(1e-5 + 9e-5 * rate(name, update, last) for update in range(2, TOTAL + 1))]
        assert found == pytest.approx(want), name


@pytest.mark.parametrize("name", SPECS)
def test_three_steps_on_one_rank_are_pytorchs(alone: dict[str, Any], references: dict[str, Any], name: str) -> None:
    (got, metrics), (want, norms) = alone["trained"][list(SPECS).index(name)], references[name]
    assert apart(got, want) <= 1e-5
    assert min(norms) > CLIP, "clipping that does nothing proves nothing"
    assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-5)
    spec = SPECS[name]
    assert [m["lr"] for m in metrics] == pytest.approx([spec.lr * x for x in (1.0, 0.91, 0.82)])


def test_muon_without_nesterov_is_the_papers_too(alone: dict[str, Any], folder: Path) -> None:
    assert apart(alone["trained"][3][0], by_torch(folder, PLAIN_MUON)[0]) <= 1e-5


@pytest.mark.parametrize("name", SPECS)
def test_norms_that_decay_and_groups_that_are_ignored_would_show(
    references: dict[str, Any], folder: Path, name: str
) -> None:
    """The laws can fail: what they compare with is far from what these faults give."""
    want = references[name][0]
    for wrong in (by_torch(folder, SPECS[name], decays=lambda _: True), by_torch(folder, SPECS[name], no_groups)):
        assert apart(wrong[0], want) > 1e-4


@pytest.mark.parametrize("name", SPECS)
def test_two_ranks_give_the_weights_of_one(pair: dict[str, Any], references: dict[str, Any], name: str) -> None:
    first = list(SPECS).index(name) * len(TWO)
    for layout, (got, _) in zip(TWO, pair["trained"][first:], strict=False):
        assert apart(got, references[name][0]) <= 1e-5, layout


@pytest.mark.slow
def test_four_ranks_give_the_weights_of_one(folder: Path, references: dict[str, Any], tmp_path: Path) -> None:
    cases = [Case(folder, spec, layout) for spec in SPECS.values() for layout in FOUR]
    made = run_ranks(trained, 4, tmp_path, cases, STEPS)
    for index, (got, _) in enumerate(made):
        assert apart(got, references[list(SPECS)[index // len(FOUR)]][0]) <= 1e-5, cases[index]


@pytest.mark.parametrize("index", range(2), ids=["adapters", "experts"])
def test_muon_moves_each_matrix_of_adapters_and_experts_by_its_own_momentum(
    pair: dict[str, Any], alone: dict[str, Any], index: int
) -> None:
    before, after, state = alone["first"][index]
    hidden = [name.partition("/")[2] for name in state if name.startswith("momentum_buffer/")]
    assert len(hidden) == len([n for n in before if "lora" in n or n.endswith("_proj.weight")])
    assert not [name for name in hidden if "mlp.gate." in name or "embed" in name or "lm_head" in name]
    for name in hidden:
        momentum = state[f"momentum_buffer/{name}"].double()
        if not momentum.any():
            continue  # A of an adapter whose B is still 0
        step = 0.2 * max(momentum.shape) ** 0.5 * orthogonal(momentum)
        want = before[name].double() * (1 - BARE_MUON.lr * DECAY) - BARE_MUON.lr * step
        assert float((after[name] - want).abs().max()) <= 1e-5, name
    for got in (pair["first"][index], pair["first"][index + 2]):
        assert apart(got[1], after) <= 1e-5


@pytest.mark.parametrize("index", range(4), ids=[*SPECS, "bfloat16"])
def test_state_loads_at_any_layout_as_the_same_bytes(pair: dict[str, Any], alone: dict[str, Any], index: int) -> None:
    want = pair["saved"][index][0]
    each = len(LOADS)
    for got, _ in (*pair["loaded"][index * each : (index + 1) * each], alone["loaded"][index]):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert any(bool(tensor.any()) for tensor in want.values())


@pytest.mark.parametrize("index", range(3), ids=list(SPECS))
def test_the_two_steps_after_a_load_are_those_without(pair: dict[str, Any], alone: dict[str, Any], index: int) -> None:
    want = pair["saved"][index][1]
    each = len(LOADS)
    for _, got in (*pair["loaded"][index * each : (index + 1) * each], alone["loaded"][index]):
        assert apart(got, want) <= 2e-6


def test_each_optimizer_stores_its_own_state(pair: dict[str, Any]) -> None:
    kinds = [{} for _ in range(4)]
    for found, (stored, _) in zip(kinds, pair["saved"], strict=True):
        for name in stored:
            found.setdefault(name.partition("/")[0], set()).add(name.partition("/")[2])
    adamw, sgd, muon, half = kinds
    everything = adamw["exp_avg"]
    assert adamw == {"exp_avg": everything, "exp_avg_sq": everything} and sgd == {"momentum_buffer": everything}
    hidden = {n for n in everything if n.startswith("model.layers.") and n.endswith("_proj.weight")}
    rest = everything - hidden
    assert muon == {"exp_avg": rest, "exp_avg_sq": rest, "momentum_buffer": hidden}
    assert half == {**muon, "master": everything}


@pytest.mark.parametrize("index", range(3), ids=list(SPECS))
def test_without_gradients_weight_decay_moves_matrices_alone_and_what_a_group_names(
    alone: dict[str, Any], index: int
) -> None:
    before, after = alone["still"][index]
    spec: OptimizerBase = list(SPECS.values())[index]
    for name in before:
        scale, decay = group_of(name)
        lr, usual = spec.lr * scale, DECAY
        if isinstance(spec, MuonOptimizer) and not name.endswith("_proj.weight"):
            lr, usual = 5e-3 * scale, 0.1
        if decay is None:
            decay = 0.0 if name.endswith(("bias", "norm.weight")) else usual
        assert torch.equal(before[name], after[name]) == (decay == 0.0), name
        assert torch.allclose(after[name], before[name] * (1 - lr * decay), rtol=0, atol=1e-6), name


def test_a_checkpoint_of_another_optimizer_is_refused_with_both_names(alone: dict[str, Any]) -> None:
    for message, names in zip(alone["refused"], (("sgd", "adamw"), ("muon", "sgd"), ("adamw", "muon")), strict=False):
        assert f"the state of `optimizer.kind: {names[0]}`" in message
        assert f"the spec has `optimizer.kind: {names[1]}`" in message


def test_a_group_that_does_not_fit_the_model_is_refused(alone: dict[str, Any]) -> None:
    nothing, shadowed, cut = alone["refused"][3:]
    assert "`optimizer.groups[0].match` is '*.embed.weight', which matches no parameter" in nothing
    assert "model.embed_tokens.weight" in nothing
    assert "`optimizer.groups[1].match` is 'model.norm.*', and all that it matches is in groups before it" in shadowed
    assert "q_proj.weight, model.layers.0.self_attn.k_proj.weight" in cut


def test_the_state_of_a_checkpoint_that_names_no_optimizer_is_adamws(
    folder: Path, roots: list[Path], pair: dict[str, Any], tmp_path: Path
) -> None:
    name = roots[0] / "step_2" / "optimizer" / "optimizer.json"
    name.rename(tmp_path / "moved.json")
    try:
        assert run_ranks(refused, 1, tmp_path, Case(folder, ADAMW), roots[0]) == ""
    finally:
        (tmp_path / "moved.json").rename(name)
