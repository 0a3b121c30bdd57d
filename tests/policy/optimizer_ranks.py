"""What the ranks of `test_optimizer_laws.py` do; each function returns plain values from rank 0."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster.context import RankContext, axis_ranks
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.spec.optimizer import OptimizerSpec
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec, OffloadSpec, PolicySpec
from tests.policy.ranks import save_checkpoint, state_of
from tests.policy.test_laws import make_batch

Tensors = dict[str, torch.Tensor]
TOTAL = 10
"""Optimizer steps that schedules span."""
AFTER = 2
"""Steps before a checkpoint, and after it."""
ONE = LayoutSpec()


@dataclass(frozen=True)
class Case:
    """One model trained one way."""

    folder: Path
    optimizer: OptimizerSpec
    layout: LayoutSpec = ONE
    dtype: str = "float32"
    lora: LoraSpec | None = None
    on_host: bool = False
    """`policy.offload.optimizer`"""


def member(rank: int, world: int, port: int, case: Case) -> PolicyRank:
    """A rank that is ready to train."""
    layout = case.layout
    axes = {"dp": layout.dp, "pp": layout.pp, "tp": layout.tp}
    place = RankContext("p", rank, world, axes, axis_ranks(rank, axes), "127.0.0.1", port, 1, Path("unused"), "node")
    policy = PolicySpec(layout=layout, lora=case.lora, offload=OffloadSpec(optimizer=case.on_host))
    seed = None if case.lora is None else 5
    made = PolicyRank(place, folder=str(case.folder), policy=policy, dtype=case.dtype, adapter_seed=seed)
    made.start_training(case.optimizer, TOTAL)
    return made


def train(this: PolicyRank, steps: int) -> list[dict[str, float]]:
    """Metrics of so many steps on one batch."""
    return [this.train_step(make_batch(), None, CrossEntropy()) for _ in range(steps)]


def weights(this: PolicyRank) -> Tensors:
    """A copy of every trained weight by its name on disk."""
    return {n: t.clone() for n, t in this.backend.store.trained.iter_hf(this.model) if t is not None}


def state(this: PolicyRank) -> Tensors:
    """A copy of the optimizer's state by kind and name."""
    return state_of(this)


def trained(rank: int, world: int, port: int, cases: list[Case], steps: int) -> list[tuple[Tensors, Any]]:
    """Weights after so many steps, and their metrics, of each case, one after another in one world."""
    found = []
    for case in cases:
        this = member(rank, world, port, case)
        metrics = train(this, steps)
        found.append((weights(this), metrics))
    return found


def first(rank: int, world: int, port: int, cases: list[Case]) -> list[tuple[Tensors, Tensors, Tensors]]:
    """Weights before and after a first step, and the optimizer's state then."""
    found = []
    for case in cases:
        this = member(rank, world, port, case)
        before = weights(this)
        train(this, 1)
        found.append((before, weights(this), state(this)))
    return found


def still(rank: int, world: int, port: int, cases: list[Case]) -> list[tuple[Tensors, Tensors]]:
    """Weights before and after a step whose every gradient is 0."""
    found = []
    for case in cases:
        this = member(rank, world, port, case)
        before = weights(this)
        batch = make_batch()
        nothing = batch.with_extras(advantages=torch.zeros(batch.tokens.numel()))
        this.train_step(nothing, None, PolicyGradient(on_policy=True))
        found.append((before, weights(this)))
    return found


def saved(rank: int, world: int, port: int, cases: list[Case], roots: list[Path]) -> list[tuple[Tensors, Tensors]]:
    """Save after two steps; the optimizer's state then, and the weights after two more."""
    found = []
    for case, root in zip(cases, roots, strict=True):
        this = member(rank, world, port, case)
        train(this, AFTER)
        save_checkpoint(this, root, AFTER)
        then = state(this)
        train(this, AFTER)
        found.append((then, weights(this)))
    return found


def loaded(rank: int, world: int, port: int, cases: list[Case], roots: list[Path]) -> list[tuple[Tensors, Tensors]]:
    """The optimizer's state after loading what `saved` wrote, and the weights after two more steps."""
    found = []
    for case, root in zip(cases, roots, strict=True):
        this = member(rank, world, port, case)
        this.load(str(root / f"step_{AFTER}"), AFTER)
        then = state(this)
        train(this, AFTER)
        found.append((then, weights(this)))
    return found


def refused(rank: int, world: int, port: int, case: Case, root: Path | None) -> str:
    """The error that a case, or its loading of a checkpoint, ends in."""
    try:
        this = member(rank, world, port, case)
        if root is not None:
            this.load(str(root / f"step_{AFTER}"), AFTER)
    except NrlError as error:
        return str(error)
    return ""


def rates(rank: int, world: int, port: int, folder: Path, optimizers: list[OptimizerSpec]) -> list[list[float]]:
    """Learning rates of all updates of each schedule."""
    return [[m["lr"] for m in train(member(rank, world, port, Case(folder, one)), TOTAL)] for one in optimizers]


def one_rank(
    rank: int,
    world: int,
    port: int,
    cases: list[Case],
    further: list[Case],
    loads: list[Case],
    roots: list[Path],
    bad: list[Any],
    schedules: list[OptimizerSpec],
) -> dict[str, Any]:
    """Every law of a single rank, in one process."""
    ready = (rank, world, port)
    return {
        "rates": rates(*ready, cases[0].folder, schedules),
        "trained": trained(*ready, cases, 3),
        "still": still(*ready, cases),
        "first": first(*ready, further),
        "loaded": loaded(*ready, loads, roots),
        "refused": [refused(*ready, *one) for one in bad],
    }


def two_ranks(
    rank: int,
    world: int,
    port: int,
    cases: list[Case],
    further: list[Case],
    saves: list[Case],
    loads: list[Case],
    roots: list[Path],
) -> dict[str, Any]:
    """Training at every layout, then saving at one and loading at others."""
    ready = (rank, world, port)
    each = len(loads) // len(saves)
    return {
        "trained": trained(*ready, cases, 3),
        "first": first(*ready, further),
        "saved": saved(*ready, saves, roots),
        "loaded": loaded(*ready, loads, [root for root in roots for _ in range(each)]),
    }
