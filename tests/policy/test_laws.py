"""The policy's gradient is that of the plain loss, however the batch is split, laid out or spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.kl import KlSpec
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from nemo_rl_like.spec.policy_losses import SequenceMeanTokenMean
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows
from tests.policy.ranks import context_of, run_ranks, state_of
from tests.tiny_folders import save_llama

VOCAB = 97
TEMPERATURE = 0.7
OBJECTIVE = PolicyGradient(AlgorithmSpec(aggregation=SequenceMeanTokenMean(), kl=KlSpec(coef=0.1), entropy_coef=0.01))
BETA1 = 0.9


def make_folder(path: Path, tied: bool = True) -> Path:
    """The model of these laws: enough layers for two pipeline stages of two."""
    return save_llama(path, VOCAB, layers=4, tied=tied)


def make_batch() -> TokenBatch:
    """Three prompts with two to three responses, one of them invalid, one with environment tokens inside."""
    gen = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(0, VOCAB, (n,), generator=gen).tolist()
    rows, episode = [], 0
    for prompt_id, (prompt_len, lengths) in enumerate([(5, (4, 7)), (3, (6, 1, 5)), (9, (2, 3))]):
        prompt = draw(prompt_len)
        for length in lengths:
            n = prompt_len + length
            mask = [False] * prompt_len + [True] * length
            if length == 7:
                mask[prompt_len + 2 : prompt_len + 4] = [False, False]
            valid = episode != 5
            rows.append(
                Row(
                    tokens=prompt + draw(length),
                    prompt_len=prompt_len,
                    loss_mask=mask if valid else [False] * n,
                    behavior=[0.0] * n,
                    version=[0 if m else -1 for m in mask],
                    prompt_id=prompt_id,
                    group_id=prompt_id,
                    episode_id=episode,
                    valid=valid,
                    rewards={"reward": 1.0 if valid else float("nan")},
                )
            )
            episode += 1
    batch = batch_rows(rows)
    n = batch.tokens.numel()
    values = lambda: torch.randn(n, generator=gen) * 0.3 - 4.6
    return batch.with_extras(proximal=values(), reference=values(), advantages=torch.randn(n, generator=gen))


def reference(folder: Path, batch: TokenBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor, float]:
    """Gradients by Hugging Face name, log-probs [N] and the loss, by Hugging Face's model in float64, row by row."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    stats = OBJECTIVE.prepare(batch)
    cuts = batch.cu_seqlens.tolist()
    flat = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(cuts, cuts[1:], strict=False):
        ids = batch.tokens[start:end]
        table = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        for t in range(1, end - start):
            i = start + t
            if not batch.loss_mask[i]:
                continue
            current = table[t - 1, ids[t]]
            flat[i] = current.detach()
            entropy = -(table[t - 1].exp() * table[t - 1]).sum()
            ratio = (current - batch.extras["proximal"][i]).exp()
            advantage = batch.extras["advantages"][i].double()
            policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            x = current - batch.extras["reference"][i]
            loss = policy + 0.1 * ((-x).exp() - 1 + x) - 0.01 * entropy
            row = int(batch.row_of_token[i])
            trained = batch.trained_per_row
            total = total + loss / (int((trained > 0).sum()) * int(trained[row]))
    assert torch.allclose(stats.weights.sum(), torch.ones(()), atol=1e-6)
    total.backward()
    gradients = {
        name: p.grad.float()
        for name, p in model.named_parameters()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    return gradients, flat.float(), float(total.detach())


def step(rank: int, world: int, port: int, folder: Path, policy: PolicySpec, order: list[int] | None) -> dict[str, Any]:
    """One step on this rank; gradients by Hugging Face name (Adam's first moment without clipping, over 1 - beta1)."""
    from nemo_rl_like.policy.rank import PolicyRank

    layout = policy.layout
    context = context_of(layout, rank, world, port)
    member = PolicyRank(context, folder=str(folder), policy=policy, dtype="float32")
    batch = make_batch() if order is None else make_batch().select(order)
    flat = member._walk(batch, batch.trained_per_row > 0, _walk_at(TEMPERATURE), training=False).logprobs
    member.start_training(AdamWOptimizer(lr=1e-3, clip_grad=0.0, betas=(BETA1, 0.999)), 10)
    metrics = member.train_step(batch, None, OBJECTIVE, TEMPERATURE)
    moments = state_of(member)
    gradients = {
        name.removeprefix("exp_avg/"): value / (1 - BETA1)
        for name, value in moments.items()
        if value is not None and name.startswith("exp_avg/")
    }
    return {"metrics": metrics, "gradients": gradients, "logprobs": flat}


def _walk_at(temperature: float) -> Any:
    from nemo_rl_like.policy.rank import Walk

    return Walk(temperature)


Case = tuple[Path, PolicySpec, list[int] | None]


def steps(rank: int, world: int, port: int, cases: list[Case]) -> list[Any]:
    """One step of each (model, spec, order of rows), one after another in one world."""
    return [step(rank, world, port, *case) for case in cases]


def check(got: dict[str, Any], want: tuple[dict[str, torch.Tensor], torch.Tensor | None, float]) -> None:
    gradients, flat, loss = want
    assert got["gradients"].keys() == gradients.keys()
    worst = max((got["gradients"][name] - gradients[name]).abs().max().item() for name in gradients)
    assert worst <= 1e-5, f"gradients differ by {worst}"
    assert got["metrics"]["loss"] == pytest.approx(loss, abs=1e-5)
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    assert got["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5), "what clipping divides by"
    if flat is not None:
        assert (got["logprobs"] - flat).abs().max() <= 1e-5


MODELS = ("tied", "untied")
KINDS = ("shared_prefix", "packed", "padded")
BUDGETS = (4096, 20, 1)
"""Tokens: one micro-batch, about five, one row (or the least part of a group) each."""
ORDER = [6, 2, 0, 4, 5, 1, 3]
ONE_GROUP = [0, 1]
TWO_RANKS = [
    *(
        PolicySpec(layout=layout, micro_batch_tokens=budget)
        for layout in (
            LayoutSpec(dp=2),
            LayoutSpec(tp=2),
            LayoutSpec(pp=2),
            LayoutSpec(pp=2, vpp=2),
            LayoutSpec(tp=2, sp=True),
            LayoutSpec(cp=2),
        )
        for budget in (4096, 20)
    ),
    PolicySpec(layout=LayoutSpec(pp=2), rows="padded", micro_batch_tokens=20),
]
Reference = tuple[dict[str, torch.Tensor], torch.Tensor, float]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with a tied and with a separate output head."""
    return {name: make_folder(tmp_path_factory.mktemp(name), tied=name == "tied") for name in MODELS}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    """The float64 step of each model."""
    return {name: reference(folder, make_batch()) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Steps on one rank: each kind of rows with each budget, then another order of rows. One process makes them all."""
    policies = [PolicySpec(rows=kind, micro_batch_tokens=budget) for kind in KINDS for budget in BUDGETS]
    cases = [(f, p, None) for f in folders.values() for p in policies]
    cases += [(f, PolicySpec(), ORDER) for f in folders.values()]
    made = run_ranks(steps, 1, tmp_path_factory.mktemp("one"), cases)
    count = len(policies)
    return {"tied": made[:count], "untied": made[count:-2], "order": made[-2:]}


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Steps on two ranks: each layout, then a single group that leaves one data-parallel rank without work."""
    alone = [PolicySpec(layout=LayoutSpec(dp=2)), PolicySpec(layout=LayoutSpec(dp=2), rows="packed")]
    cases: list[Case] = [(f, p, None) for f in folders.values() for p in TWO_RANKS]
    cases += [(folders["tied"], p, ONE_GROUP) for p in alone]
    made = run_ranks(steps, 2, tmp_path_factory.mktemp("two"), cases)
    count = len(TWO_RANKS)
    return {"tied": made[:count], "untied": made[count : 2 * count], "alone": made[2 * count :]}


@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_the_plain_one_for_any_rows_and_any_micro_batches(
    name: str, one_rank: dict[str, list[Any]], references: dict[str, Reference]
) -> None:
    for got in one_rank[name]:
        check(got, references[name])


def test_gradient_does_not_depend_on_the_order_of_rows(
    one_rank: dict[str, list[Any]], references: dict[str, Reference]
) -> None:
    for name, got in zip(MODELS, one_rank["order"], strict=True):
        gradients, _, loss = references[name]
        check(got, (gradients, None, loss))


@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_the_plain_one_over_two_ranks(
    name: str, two_ranks: dict[str, list[Any]], references: dict[str, Reference]
) -> None:
    for got in two_ranks[name]:
        check(got, references[name])


def test_a_data_parallel_rank_without_trainable_tokens_changes_nothing(
    two_ranks: dict[str, list[Any]], folders: dict[str, Path]
) -> None:
    """All rows are one group, which stays on one rank under `shared_prefix`: the other runs an empty micro-batch."""
    gradients, _, loss = reference(folders["tied"], make_batch().select(ONE_GROUP))
    for got in two_ranks["alone"]:
        check(got, (gradients, None, loss))


@pytest.mark.slow
def test_gradient_is_the_plain_one_over_four_ranks(
    folders: dict[str, Path], references: dict[str, Reference], tmp_path: Path
) -> None:
    layouts = [LayoutSpec(tp=2, pp=2), LayoutSpec(dp=2, tp=2), LayoutSpec(dp=2, pp=2), LayoutSpec(tp=2, pp=2, sp=True)]
    layouts += [LayoutSpec(dp=2, pp=2, vpp=2), LayoutSpec(cp=2, pp=2, vpp=2), LayoutSpec(pp=4)]
    cases = [(folder, PolicySpec(layout=layout), None) for folder in folders.values() for layout in layouts]
    made = run_ranks(steps, 4, tmp_path, cases)
    for index, got in enumerate(made):
        check(got, references[MODELS[index // len(layouts)]])
