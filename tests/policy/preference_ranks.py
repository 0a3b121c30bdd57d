"""What the ranks of `test_preference_laws.py` do; each function returns plain values from rank 0."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from nemo_rl_like.algorithms.preference import objective_of
from nemo_rl_like.data.messages import assistant, user
from nemo_rl_like.data.preference_rows import judged_rows, pair_rows
from nemo_rl_like.data.preferences import Pair, unpaired
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.policy.rank import PolicyRank, Walk
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from nemo_rl_like.spec.preference import PreferenceSpec
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows
from tests.policy.ranks import of_any_layout
from tests.policy.step_laws import member

CHARACTERS = "0123456789+="
RENDERER = Renderer(character_tokenizer(CHARACTERS), "test")
VOCAB = len(RENDERER.tokenizer)
FAST = AdamWOptimizer(lr=3e-3, clip_grad=1.0)


def sums(count: int, seed: int) -> list[Pair]:
    """Sums whose chosen answer repeats the first digit and whose rejected one does not: a rule that a tiny model finds."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        other = (a + 1 + draw.randint(0, 8)) % 10
        sides = [(assistant(f"{x}{x}"),) for x in (a, other)]
        made.append(Pair((user(f"{a}+{b}="),), sides[0], sides[1], None, f"sums:{i}"))
    return made


def rows_of(pairs: list[Pair], *, kto: bool = False) -> TokenBatch:
    """The batch of these pairs."""
    make: Any = judged_rows if kto else pair_rows
    return batch_rows(make(unpaired(pairs) if kto else pairs, RENDERER, max_tokens=32).rows)


def reference_of(this: PolicyRank, batch: TokenBatch) -> torch.Tensor:
    """The log-probs of the model as it is, [N]."""
    return this._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False).logprobs


def options(**fields: Any) -> PreferenceSpec:
    return PreferenceSpec.model_validate(fields)


def losses(
    rank: int, world: int, port: int, folder: Path, layouts: list[tuple[LayoutSpec, str, int]]
) -> list[dict[str, float]]:
    """Metrics of a DPO step with every option, of a kto step and of both without a step, at each layout, kind of rows and budget."""
    found = []
    for layout, rows, budget in layouts:
        policy = PolicySpec.model_validate({"layout": layout, "rows": rows, "micro_batch_tokens": budget})
        this = member(rank, world, port, folder, policy, FAST)
        pairs = sums(6, 1)
        batch, judged = rows_of(pairs), rows_of(pairs, kto=True)
        batch = batch.with_extras(reference=reference_of(this, batch) - 0.1)
        judged = judged.with_extras(reference=reference_of(this, judged) - 0.1)
        objective = objective_of(options(losses=[{"kind": "dpo"}], wpo=True, rpo_alpha=0.5, ld_alpha=0.5))
        kto = objective_of(options(losses=[{"kind": "kto"}]))
        seen = {f"eval/{k}": v for k, v in this.evaluate_loss(batch, objective).items()}
        seen |= {f"kto/{k}": v for k, v in this.evaluate_loss(judged, kto).items()}
        seen |= of_any_layout(this.train_step(batch, None, objective))
        seen |= {f"kto_step/{k}": v for k, v in of_any_layout(this.train_step(judged, None, kto)).items()}
        found.append(seen)
    return found


def learned(rank: int, world: int, port: int, folder: Path, fields: dict[str, Any], steps: int) -> list[float]:
    """Held-out accuracy of the policy's own log-probs before and after `steps` steps."""
    this = member(rank, world, port, folder, PolicySpec(micro_batch_tokens=512), FAST)
    objective = objective_of(options(**fields))
    everything = sums(120, 2)
    held = rows_of([pair for pair in everything if pair.prompt[0].content[2] in "37"])
    train = [pair for pair in everything if pair.prompt[0].content[2] not in "37"]
    before = own_accuracy(this, held)
    batch = rows_of(train[:64])
    ready = batch.with_extras(reference=reference_of(this, batch))
    for _ in range(steps):
        this.train_step(ready, None, objective)
    return [before, own_accuracy(this, held)]


def own_accuracy(this: PolicyRank, batch: TokenBatch) -> float:
    """Share of pairs whose chosen completion is the likelier one."""
    logprobs = reference_of(this, batch)
    total = torch.zeros(batch.rows).index_add_(0, batch.row_of_token, torch.where(batch.loss_mask, logprobs, 0.0))
    return float((total[0::2] > total[1::2]).float().mean())
