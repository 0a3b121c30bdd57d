"""What the ranks of `test_fsdp_laws.py` do; each function returns plain values from rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_rl_like.policy.rank import PolicyRank, Walk
from nemo_rl_like.policy.top import TopK
from nemo_rl_like.spec.optimizer import AdamWOptimizer, OptimizerSpec, ParameterGroup, SgdOptimizer
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch
from tests.policy.ranks import context_of, save_checkpoint
from tests.policy.test_laws import OBJECTIVE, TEMPERATURE, make_batch

STEPS = 3
ADAMW = AdamWOptimizer(
    lr=1e-2,
    eps=1e-4,
    weight_decay=0.1,
    clip_grad=0.5,
    schedule="cosine",
    warmup_steps=1,
    groups=(ParameterGroup(match="*embed_tokens.weight", lr_scale=0.5),),
)
SGD = SgdOptimizer(lr=1e-2, weight_decay=0.1)
Found = dict[str, Any]


def member(
    rank: int, world: int, port: int, folder: Path, policy: PolicySpec, optimizer: OptimizerSpec, dtype: str = "float32"
) -> PolicyRank:
    """A rank that is ready to train."""
    place = context_of(policy.layout, rank, world, port)
    made = PolicyRank(place, folder=str(folder), policy=policy, dtype=dtype)
    made.start_training(optimizer, 10)
    return made


def weights(of: PolicyRank) -> dict[str, torch.Tensor]:
    """A copy of every weight."""
    return {name: tensor.clone() for name, tensor in of.backend.weights() if tensor is not None}


def looked_at(of: PolicyRank, batch: TokenBatch) -> Found:
    """Log-probs and entropies of the trained tokens."""
    walked = of._walk(batch, batch.trained_per_row > 0, Walk(TEMPERATURE, keep_entropy=True), training=False)
    return {"log-probs": walked.logprobs.clone(), "entropy": walked.entropy.clone()}


def trained(
    rank: int, world: int, port: int, cases: list[tuple[Path, PolicySpec, OptimizerSpec]], dtype: str = "float32"
) -> list[Found]:
    """Of each case: what the model says, the metrics of some steps, and the weights after them."""
    found = []
    for folder, policy, optimizer in cases:
        this, batch = member(rank, world, port, folder, policy, optimizer, dtype), make_batch()
        one = looked_at(this, batch) | {"validation": this.evaluate_loss(batch, OBJECTIVE, TEMPERATURE)}
        one["metrics"] = [this.train_step(batch, None, OBJECTIVE, TEMPERATURE) for _ in range(STEPS)]
        found.append(one | {"weights": weights(this), "after": looked_at(this, batch)})
    return found


def told(rank: int, world: int, port: int, folder: Path, policies: list[PolicySpec]) -> list[list[torch.Tensor]]:
    """The likeliest tokens and their log-probs, as a teacher of each policy tells them."""
    from nemo_rl_like.policy.top import top_of_batch

    found = []
    for policy in policies:
        this = member(rank, world, port, folder, policy, ADAMW)
        ids, logprobs = top_of_batch(this.backend, make_batch(), TopK(3, TEMPERATURE, below=90), policy)
        found.append([ids.clone(), logprobs.clone()])
    return found


def crossed(
    rank: int, world: int, port: int, folder: Path, root: Path, policies: tuple[PolicySpec, PolicySpec], dtype: str
) -> dict[str, list[list[float]]]:
    """Each backend trains and saves; both then go on from the file: {who saved: losses of [itself, each that loaded]}."""
    found, batch = {}, make_batch()
    for saver in policies:
        this = member(rank, world, port, folder, saver, ADAMW, dtype)
        for _ in range(STEPS):
            this.train_step(batch, None, OBJECTIVE, TEMPERATURE)
        where = root / saver.backend
        save_checkpoint(this, where, STEPS)
        runs = [this]
        for loader in policies:
            other = member(rank, world, port, folder, loader, ADAMW, dtype)
            other.load(str(where / f"step_{STEPS}"), STEPS)
            runs.append(other)
        found[saver.backend] = [
            [one.train_step(batch, None, OBJECTIVE, TEMPERATURE)["loss"] for _ in range(2)] for one in runs
        ]
    return found
