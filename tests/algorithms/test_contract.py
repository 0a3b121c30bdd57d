"""The contract of every algorithm: value and gradient equal to the float64 oracle, for every choice and every pair of choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_like.algorithms import advantages, aggregation, corrections, kl, policy_losses, shaping
from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.algorithms.step import with_advantages
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.tokens.batch import TokenBatch

from . import cells, steps
from .oracle.advantages import advantages as oracle_advantages
from .oracle.policy import objective as oracle_objective
from .oracle.samples import Sample
from .passes import made, splits

LIMIT = 7
"""max_new_tokens."""
CELLS = list(cells.covering())


@dataclass(frozen=True)
class Both:
    """One step, for the oracle and for the package."""

    samples: list[Sample]
    current: list[list[float]]
    batch: TokenBatch
    """With advantages and everything that an objective may read."""
    places: list[list[int]]

    @classmethod
    def of(cls, algorithm: AlgorithmSpec, seed: int, *, two_rows: bool = False) -> Both:
        """A random step; for maxrl, which takes no negative reward, far above 0."""
        samples = steps.random_step(seed)
        if algorithm.advantage.kind == "maxrl":
            samples = [replace(sample, reward=sample.reward + 8.0) for sample in samples]
        batch, places = steps.to_batch(samples, two_rows=two_rows)
        current = steps.random_current(seed, samples)
        ready = with_advantages(batch, algorithm, LIMIT)
        ready = ready.with_extras(current=steps.on_batch(batch, places, current).float())
        return cls(samples, current, ready, places)

    def flat(self, values: Sequence[Sequence[float]]) -> Tensor:
        """float64 [N]: a number a token of the samples, at its place in the batch."""
        return steps.on_batch(self.batch, self.places, values)


def expected(algorithm: AlgorithmSpec, both: Both) -> tuple[Tensor, Tensor]:
    """The oracle's loss, and its gradient by the current log-probs as float64 [N]."""
    found = oracle_advantages(algorithm, both.samples, LIMIT)
    leaves = [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in row] for row in both.current]
    entropy = [
        [torch.tensor(tok.entropy, dtype=torch.float64, requires_grad=True) for tok in sample.tokens]
        for sample in both.samples
    ]
    loss = oracle_objective(algorithm, both.samples, found.advantages, leaves, entropy, LIMIT)
    if loss.requires_grad:
        loss.backward()
    slopes = [[0.0 if x.grad is None else float(x.grad) for x in row] for row in leaves]
    return loss.detach(), both.flat(slopes)


def ids(cell: cells.Cell) -> str:
    """A short name of a cell."""
    return "-".join([cell["advantage"]["kind"], cell["policy_loss"]["kind"], *(c["kind"] for c in cell["correction"])])


@pytest.mark.parametrize("number", range(len(CELLS)), ids=[f"{i}-{ids(cell)}" for i, cell in enumerate(CELLS)])
def test_a_cell_equals_the_oracle_in_value_and_gradient_for_any_split(number: int) -> None:
    algorithm = AlgorithmSpec.model_validate(CELLS[number])
    both = Both.of(algorithm, seed=number, two_rows=number % 2 == 1)
    wanted = both.flat(oracle_advantages(algorithm, both.samples, LIMIT).advantages)
    torch.testing.assert_close(both.batch.extras["advantages"].double(), wanted, atol=2e-6, rtol=1e-5)
    loss, slope = expected(algorithm, both)
    objective = PolicyGradient(algorithm, max_new_tokens=LIMIT)
    current = both.flat(both.current)
    for parts in splits(objective, both.batch):
        got, got_slope = made(objective, both.batch, current, parts)
        torch.testing.assert_close(got, loss, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got_slope, slope, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gae", "vapo"])
def test_the_critics_returns_equal_the_oracle(kind: str) -> None:
    algorithm = AlgorithmSpec.model_validate({"advantage": {"kind": kind, **cells.BITING[kind]}})
    both = Both.of(algorithm, seed=5)
    wanted = both.flat(oracle_advantages(algorithm, both.samples, LIMIT).returns)
    torch.testing.assert_close(both.batch.extras["returns"].double(), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("number", range(0, len(CELLS), 4))
def test_row_order_and_padding_change_nothing(number: int) -> None:
    algorithm = AlgorithmSpec.model_validate(CELLS[number])
    both = Both.of(algorithm, seed=number)
    objective, current = PolicyGradient(algorithm, max_new_tokens=LIMIT), both.flat(both.current)
    whole = [both.batch.loss_mask.nonzero()[:, 0]]
    loss, slope = made(objective, both.batch, current, whole)
    order = torch.randperm(both.batch.rows, generator=torch.Generator().manual_seed(number)).tolist()
    cuts = both.batch.cu_seqlens.tolist()
    moved = torch.cat([torch.arange(cuts[row], cuts[row + 1]) for row in order])
    bare = replace(
        both.batch, extras={k: v for k, v in both.batch.extras.items() if k not in ("advantages", "returns")}
    )
    shuffled = with_advantages(bare.select(order), algorithm, LIMIT)
    got, got_slope = made(objective, shuffled, current[moved], [shuffled.loss_mask.nonzero()[:, 0]])
    torch.testing.assert_close(got, loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got_slope, slope[moved], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_a_cell_is_finite_whatever_happens(number: int) -> None:
    algorithm = AlgorithmSpec.model_validate(CELLS[number])
    both = Both.of(algorithm, seed=number)
    objective = PolicyGradient(algorithm, max_new_tokens=LIMIT)
    places = both.batch.loss_mask.nonzero()[:, 0]
    current = both.flat(both.current)
    far = current + 50 * torch.where(torch.arange(current.numel()) % 2 == 0, 1.0, -1.0)
    assert all(x.isfinite().all() for x in made(objective, both.batch, far, [places]))
    dirty = {
        name: torch.where(both.batch.loss_mask, value, torch.nan)
        for name, value in both.batch.extras.items()
        if name not in ("turn", "anchor", "advantages", "returns")
    }
    spoilt = with_advantages(replace(both.batch, extras={**both.batch.extras, **dirty}), algorithm, LIMIT)
    clean = made(objective, both.batch, current, [places])
    for value, want in zip(made(objective, spoilt, current, [places]), clean, strict=True):
        torch.testing.assert_close(value, want)
    nothing = replace(both.batch, loss_mask=torch.zeros_like(both.batch.loss_mask))
    empty = with_advantages(nothing, algorithm, LIMIT)
    loss, slope = made(objective, empty, current, [places[:0]])
    assert float(loss) == 0 and not slope.any()


def test_every_registered_choice_is_in_a_cell_and_every_kind_of_the_spec_is_registered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    algorithms = [AlgorithmSpec.model_validate(cell) for cell in CELLS]
    seen: dict[str, set[str]] = {
        "advantage": {a.advantage.kind for a in algorithms},
        "policy_loss": {a.policy_loss.kind for a in algorithms},
        "correction": {c.kind for a in algorithms for c in a.correction},
        "shaping": {s.kind for a in algorithms for s in a.shaping},
        "aggregation": {a.aggregation.kind for a in algorithms},
        "kl": {a.kl.estimator for a in algorithms if a.kl.coef},
    }
    registered: dict[str, Any] = {
        "advantage": {*advantages.BY_EPISODE, *advantages.BY_TOKEN},
        "policy_loss": policy_losses.LOSSES,
        "correction": corrections.CORRECTIONS,
        "shaping": shaping.SHAPINGS,
        "aggregation": aggregation.NAMES,
        "kl": kl.ESTIMATORS,
    }
    assert {axis: set(names) for axis, names in registered.items()} == seen
    with capsys.disabled():
        print(
            f"\n{len(CELLS)} cells cover all pairs of {sum(map(len, cells.axes().values()))} settings on {len(cells.axes())} axes"
        )
