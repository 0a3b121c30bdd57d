"""Megatron's forward and backward against Hugging Face's, in tokens a second, on SmolLM2's weights and shapes.

`python benchmarks/model_speed.py --model models/smollm2-135m --out benchmarks/results/model_speed.json`

Cross-entropy over every token but each row's first, float32, the same threads, one pass of each in turn. `equal` rows need no
padding anywhere, so that packing has nothing to save; `mixed` rows are padded by Hugging Face (and by our `padded` rows), and a
token counts only if it is real. Ours is the policy's own walk over its default micro-batches, with the gradient buffers of DDP.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peer import one_rank, provenance, write_json
from transformers import AutoModelForCausalLM

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.policy.rank import PolicyRank, Walk, probe_batch
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch

KINDS = ("packed", "padded")
TARGET = 1.0


def main() -> int:
    """Time every shape, write the JSON; exit 1 if packed rows are slower than Hugging Face anywhere."""
    options = _options()
    torch.set_num_threads(options.threads)
    systems = _systems(options)
    shapes = {
        "equal": [options.row_tokens] * options.rows,
        "mixed": _mixed(options.rows, options.row_tokens),
    }
    found = {name: _measure(systems, lengths, options) for name, lengths in shapes.items()}
    fast = all(result["against_hugging_face"]["packed"] >= TARGET for result in found.values())
    result = {
        "what": "forward and backward, real tokens a second, medians of alternating passes",
        "shapes": found,
        "claims": {f"packed rows: at least {TARGET:g}x Hugging Face": fast},
        "measured": provenance(options.threads),
    }
    write_json(options.out, result)
    print({name: shape["against_hugging_face"] for name, shape in found.items()})
    return 0 if fast else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/model_speed.json"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _mixed(rows: int, longest: int) -> list[int]:
    """Row lengths spread evenly from a quarter of the longest up to it."""
    return [longest * (rows + 3 * (i + 1)) // (4 * rows) for i in range(rows)]


def _systems(options: argparse.Namespace) -> dict[str, Callable[[TokenBatch], float]]:
    """One forward and backward by name; each returns the loss."""
    context = one_rank(options.threads)
    return {
        "hugging_face": _hugging_face(options.model),
        **{
            kind: _megatron(
                PolicyRank(context, folder=str(options.model), policy=PolicySpec(rows=kind), dtype="float32")
            )
            for kind in KINDS
        },
    }


def _megatron(rank: PolicyRank) -> Callable[[TokenBatch], float]:
    rank.start_training(AdamWOptimizer(), 1)
    objective = CrossEntropy()

    def run(batch: TokenBatch) -> float:
        rank.backend.zero_grad()
        stats = objective.prepare(batch)
        sums = rank._walk(batch, stats.live_rows, Walk(1.0, objective, stats), training=True).sums
        return float(sums[0])

    return run


def _hugging_face(folder: Path) -> Callable[[TokenBatch], float]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()

    def run(batch: TokenBatch) -> float:
        model.zero_grad()
        rows = batch.tokens.split(batch.lengths.tolist())
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = torch.arange(ids.shape[1]) < batch.lengths[:, None]
        loss = model(input_ids=ids, attention_mask=real.long(), labels=ids.masked_fill(~real, -100)).loss
        loss.backward()
        return float(loss.detach())

    return run


def _measure(
    systems: dict[str, Callable[[TokenBatch], float]], lengths: Sequence[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians of one shape; the first pass of each system is a warm-up."""
    generator = torch.Generator().manual_seed(0)
    batch = probe_batch([torch.randint(49152, (n,), generator=generator).tolist() for n in lengths])
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, float] = {}
    for _ in range(options.passes + 1):
        for name, run in systems.items():
            began = time.perf_counter()
            losses[name] = run(batch)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "row_tokens": list(lengths),
        "tokens_per_second": {name: round(sum(lengths) / s, 1) for name, s in medians.items()},
        "against_hugging_face": {k: round(medians["hugging_face"] / medians[k], 2) for k in KINDS},
        "loss": losses,
        "seconds": {name: [round(v, 3) for v in values] for name, values in seconds.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
