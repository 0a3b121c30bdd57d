"""What losses, advantages and packing cost: seconds per million tokens, beside the log-softmax that every step pays anyway.

`python benchmarks/losses.py --out benchmarks/results/losses.json`

A loss with its gradient is timed on float32 [tokens] (distillation: [tokens, 64] of the teacher's tokens); the log-softmax over `--vocab` entries on `--softmax-tokens` tokens, with its
gradient, scaled to a million. Advantages (shaping and estimator) and the plan of micro-batches are timed at 0.1, 1 and 10 million tokens: `growth` is the
time per token at the largest size over that at the middle one; 1 is linear.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peer import provenance, write_json

from nemo_rl_like.algorithms.distillation import generalized_jsd, with_tail
from nemo_rl_like.algorithms.objectives import CrossEntropy, Objective, Outputs
from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.algorithms.policy_losses import LOSSES
from nemo_rl_like.algorithms.preference import objective_of as preference_of
from nemo_rl_like.algorithms.preference_losses import LOSSES as PREFERENCE_LOSSES
from nemo_rl_like.algorithms.step import with_advantages
from nemo_rl_like.model import runtime
from nemo_rl_like.model.layouts import plan_microbatches
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.policy_losses import SEQUENCE_LOSSES
from nemo_rl_like.spec.preference import PreferenceSpec
from nemo_rl_like.tokens.batch import TokenBatch

ESTIMATORS = ("grpo", "rloo", "opo", "pass_at_k", "gdpo", "reinforce_pp", "gae", "vapo", "gigpo")
PROMPT, RESPONSE, GROUP = 100, 400, 8
MILLION = 1_000_000
GROWTH = 1.5
"""A part whose time per token grows by more than this from one to ten million tokens is not linear."""


def main() -> int:
    """Time everything, write the JSON; exit 1 if something is not linear in tokens."""
    options = _options()
    torch.set_num_threads(options.threads)
    runtime.keep_freed_memory()  # as a policy's ranks do: mapping fresh pages for large tensors alone doubles the time per token
    batch = make_batch(MILLION)
    softmax = log_softmax_seconds(options.vocab, options.softmax_tokens, options.repeats)
    losses = {name: loss_seconds(name, batch, options.repeats) for name in LOSSES}
    pairs = as_pairs(batch)
    losses |= {
        f"preference {name}": objective_seconds(preference(name), pairs, options.repeats) for name in PREFERENCE_LOSSES
    }
    losses["preference kto"] = objective_seconds(preference("kto"), pairs, options.repeats)
    losses["cross_entropy"] = objective_seconds(CrossEntropy(), batch, options.repeats)
    losses["distillation, 64 tokens"] = distillation_seconds(options.repeats)
    linear = {name: growth(name, options.largest) for name in (*(f"advantage {e}" for e in ESTIMATORS), *PLANS)}
    result = {
        "what": "seconds per million tokens; losses and log-softmax with their gradients",
        "log_softmax": {"vocab": options.vocab, "seconds": round(softmax, 3)},
        "losses": {
            n: {"seconds": round(s, 4), "share_of_log_softmax": round(s / softmax, 5)} for n, s in losses.items()
        },
        "linear": linear,
        "claims": {"linear in tokens": all(part["growth"] <= GROWTH for part in linear.values())},
        "measured": provenance(options.threads),
    }
    write_json(options.out, result)
    print({name: part["growth"] for name, part in linear.items()})
    return 0 if all(result["claims"].values()) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--softmax-tokens", type=int, default=2_048)
    parser.add_argument("--largest", type=int, default=10 * MILLION)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/losses.json"))
    return parser.parse_args()


def make_batch(tokens: int) -> TokenBatch:
    """Rows of one length in groups of eight, about `tokens` tokens in all."""
    length = PROMPT + RESPONSE
    rows = max(GROUP, tokens // length // GROUP * GROUP)
    count = rows * length
    draw = torch.Generator().manual_seed(1)
    mask = (torch.arange(length) >= PROMPT).repeat(rows)
    behavior = torch.randn(count, generator=draw) * 0.5 - 1.5

    def number(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=draw) * scale

    reward = (torch.rand(rows, generator=draw) < 0.4).float()
    ids = torch.arange(rows)
    return TokenBatch(
        tokens=torch.randint(0, 1000, (count,), generator=draw),
        cu_seqlens=torch.arange(rows + 1) * length,
        prompt_lens=torch.full((rows,), PROMPT),
        loss_mask=mask,
        behavior=torch.where(mask, behavior, 0.0),
        version=torch.where(mask, 0, -1).int(),
        prompt_id=ids,
        group_id=ids // GROUP,
        episode_id=ids,
        valid=torch.ones(rows, dtype=torch.bool),
        rewards={"reward": reward, "correct": reward, "format": torch.rand(rows, generator=draw)},
        columns={"truncated": torch.zeros(rows)},
        extras={
            "proximal": behavior + number(0.05),
            "current": behavior + number(0.2),
            "entropy": number(0.3).abs(),
            "values": number(0.2),
            "draws": torch.rand(count, generator=draw),
            "turn": torch.zeros(count),
            "anchor": torch.zeros(count),
        },
    )


def as_pairs(batch: TokenBatch) -> TokenBatch:
    """Two rows in a row are a pair; for kto every other one is another's completion."""
    ids = torch.arange(batch.rows)
    chosen = (ids % 2 == 0).float()
    pairs = replace(batch, group_id=ids // 2, columns={"chosen": chosen, "mismatched": 1 - chosen})
    return pairs.with_extras(reference=batch.extras["proximal"])


def preference(kind: str) -> Objective:
    """The objective of one preference loss."""
    return preference_of(PreferenceSpec.model_validate({"losses": [{"kind": kind}]}), 0.1)


def objective_seconds(objective: Objective, batch: TokenBatch, repeats: int) -> float:
    """Seconds of a loss and its gradient for a million trained tokens, the step's counts included."""
    index = batch.loss_mask.nonzero()[:, 0]
    current = batch.extras["current"][index].requires_grad_()

    def work() -> None:
        current.grad = None
        stats = objective.prepare(batch)
        values = {key: value[index] for key, value in stats.values.items()}
        objective.loss(Outputs(current), values, stats.weights[index], stats).loss.backward()

    return median_seconds(work, repeats) * MILLION / index.numel()


def distillation_seconds(repeats: int, tokens: int = 20_000, k: int = 64) -> float:
    """Seconds of the generalized divergence and its gradient for a million tokens, k of the teacher's at each."""
    student, teacher = (torch.randn(tokens, 1000).log_softmax(-1)[:, :k] for _ in range(2))
    student.requires_grad_()

    def work() -> None:
        student.grad = None
        generalized_jsd(with_tail(student), with_tail(teacher), 0.5).sum().backward()

    return median_seconds(work, repeats) * MILLION / tokens


def algorithm(**block: Any) -> AlgorithmSpec:
    """An algorithm block."""
    return AlgorithmSpec.model_validate(block)


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of `work`, after one run that is not counted."""
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def log_softmax_seconds(vocab: int, tokens: int, repeats: int) -> float:
    """Seconds of log-softmax and its gradient for a million tokens."""
    logits, targets = torch.randn(tokens, vocab, requires_grad=True), torch.randint(0, vocab, (tokens, 1))

    def work() -> None:
        logits.grad = None
        logits.log_softmax(-1).gather(1, targets).sum().backward()

    return median_seconds(work, repeats) * MILLION / tokens


def loss_seconds(name: str, batch: TokenBatch, repeats: int) -> float:
    """Seconds of a policy loss and its gradient for a million trained tokens."""
    aggregation = "sequence_mean" if name in SEQUENCE_LOSSES else "token_mean"
    objective = PolicyGradient(algorithm(policy_loss={"kind": name}, aggregation={"kind": aggregation}))
    return objective_seconds(objective, with_advantages(batch, objective.algorithm, RESPONSE), repeats)


PLANS = {f"plan {kind}": kind for kind in ("packed", "padded", "shared_prefix")}


def growth(name: str, largest: int) -> dict[str, float]:
    """Seconds per million tokens at three sizes, and how the largest compares with the middle one."""
    found = {}
    for tokens in (largest // 100, largest // 10, largest):
        batch = make_batch(tokens)
        seconds = median_seconds(_work(name, batch), 1)
        found[f"seconds_per_million_at_{tokens}"] = round(seconds * MILLION / batch.tokens.numel(), 4)
    sizes = list(found.values())
    return {**found, "growth": round(sizes[2] / max(sizes[1], 1e-4), 3)}


def _work(name: str, batch: TokenBatch) -> Callable[[], object]:
    if name in PLANS:
        rows = list(range(batch.rows))
        return lambda: plan_microbatches(
            batch, rows, dp_size=2, dp_rank=0, kind=PLANS[name], token_budget=16_384
        )  # fmt: skip
    options = algorithm(advantage={"kind": name.removeprefix("advantage ")})
    return lambda: with_advantages(batch, options, RESPONSE)


if __name__ == "__main__":
    raise SystemExit(main())
