"""What a reference model costs beside the policy: memory of the second copy, and time of its log-probs in a GRPO update.

`python benchmarks/two_copies.py --model models/smollm2-135m --out benchmarks/results/two_copies.json`

One rank, float32, 8 prompts x 8 samples x 32 tokens, rows that share their prompts. An update with KL to the reference is a forward
pass of the reference without gradient, then the policy's forward and backward and the optimizer; without, only the latter. Medians of
alternating updates after one that is not counted. With adapters (`policy.lora`) the reference is the policy without them and needs no copy: the same three
parts are timed for that too. Bytes are those of parameters, and of what training keeps beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from peer import one_rank, provenance, write_json

from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.model.lora import adapters_off
from nemo_rl_like.policy.rank import PolicyRank, Walk
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LoraSpec, PolicySpec
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows

PROMPTS, SAMPLES, PROMPT, RESPONSE = 8, 8, 40, 32
COEF = 0.05


def main() -> int:
    """Time both kinds of update, write the JSON."""
    options = _options()
    torch.set_num_threads(options.threads)
    context = one_rank(options.threads)
    policy, reference = (
        PolicyRank(context, folder=str(options.model), policy=PolicySpec(), dtype="float32") for _ in range(2)
    )
    adapted = PolicyRank(
        context, folder=str(options.model), policy=PolicySpec(lora=LoraSpec()), dtype="float32", adapter_seed=1
    )
    for trained in (policy, adapted):
        trained.start_training(AdamWOptimizer(lr=1e-6), 1000)
    batch = make_batch()
    medians = _alternating(policy, reference, batch, options.updates)
    with_adapters = _alternating(adapted, adapted, batch, options.updates)
    parameters = _bytes(reference.model)
    adapters = sum(p.numel() * p.element_size() for p in adapted.model.parameters() if p.requires_grad)
    result = {
        "what": f"one update of {PROMPTS} x {SAMPLES} rows of {PROMPT} + {RESPONSE} tokens, seconds; bytes of the copies",
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "update_with_reference_over_without": round(
            (medians["reference"] + medians["update_with_kl"]) / medians["update"], 3
        ),
        "bytes": {
            "policy_parameters": _bytes(policy.model),
            "gradients_and_moments": 3 * _bytes(policy.model),
            "reference_parameters": parameters,
            "second_copy_over_training_without_it": round(parameters / (4 * _bytes(policy.model)), 3),
        },
        "adapters": {
            "seconds": {name: round(value, 3) for name, value in with_adapters.items()},
            "update_over_update_of_all": round(with_adapters["update"] / medians["update"], 3),
            "parameters": adapters,
            "gradients_and_moments": 3 * adapters,
            "second_copy": 0,
            "training_with_reference_over_that_of_all": round((parameters + 4 * adapters) / (5 * parameters), 3),
        },
        "measured": provenance(options.threads),
    }
    write_json(options.out, result)
    print(result["seconds"], result["update_with_reference_over_without"])
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/two_copies.json"))
    return parser.parse_args()


def make_batch() -> TokenBatch:
    """Random rows, all with an advantage."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for prompt in range(PROMPTS):
        head = torch.randint(1, 40_000, (PROMPT,), generator=draw).tolist()
        for sample in range(SAMPLES):
            count = PROMPT + RESPONSE
            rows.append(
                Row(
                    tokens=head + torch.randint(1, 40_000, (RESPONSE,), generator=draw).tolist(),
                    prompt_len=PROMPT,
                    loss_mask=[i >= PROMPT for i in range(count)],
                    behavior=[0.0] * count,
                    version=[-1] * count,
                    prompt_id=prompt,
                    group_id=prompt,
                    episode_id=prompt * SAMPLES + sample,
                    rewards={"reward": 1.0},
                )
            )
    batch = batch_rows(rows)
    return batch.with_extras(advantages=torch.randn(batch.tokens.numel(), generator=draw))


def _alternating(policy: PolicyRank, reference: PolicyRank, batch: TokenBatch, updates: int) -> dict[str, float]:
    """Median seconds by part; the first update of each kind is a warm-up. A policy with adapters is its own reference."""
    plain = PolicyGradient(AlgorithmSpec(), on_policy=True)
    with_kl = PolicyGradient(AlgorithmSpec.model_validate({"kl": {"coef": COEF}}), on_policy=True)
    seconds: dict[str, list[float]] = {"update": [], "reference": [], "update_with_kl": []}

    def timed(name: str, work: Any) -> Any:
        began = time.perf_counter()
        value = work()
        seconds[name].append(time.perf_counter() - began)
        return value

    for _ in range(updates + 1):
        timed("update", lambda: policy.train_step(batch, None, plain))
        rows = torch.ones(batch.rows, dtype=torch.bool)
        with adapters_off(reference.model):
            values = timed(
                "reference", lambda rows=rows: reference._walk(batch, rows, Walk(1.0), training=False).logprobs
            )
        ready = batch.with_extras(reference=values)
        timed("update_with_kl", lambda ready=ready: policy.train_step(ready, None, with_kl))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def _bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


if __name__ == "__main__":
    raise SystemExit(main())
