"""The contract of every preference loss: value and gradient equal to the float64 oracle, for every loss and every pair of choices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from nemo_rl_like.algorithms.objectives import Outputs
from nemo_rl_like.algorithms.preference import Kto, Preference, objective_of
from nemo_rl_like.algorithms.preference_losses import LOSSES
from nemo_rl_like.spec import preference as spec
from nemo_rl_like.tokens.batch import TokenBatch

from . import pairs
from .cells import kinds
from .oracle import preference as oracle
from .pairs import Side, Step
from .passes import made, splits, with_metrics

MEAN_LOG_RATIO = 0.5
"""Of earlier steps, for bco."""
Cell = dict[str, Any]

BITING: dict[str, list[Cell]] = {
    "dpo": [{}, {"beta": 0.5, "label_smoothing": 0.2}],
    "robust": [{"label_smoothing": 0.2}],
    "ipo": [{}, {"logp_reduction": "sum", "beta": 0.3}],
    "hinge": [{"beta": 0.9}],
    "exo": [{"label_smoothing": 0.1}],
    "discopop": [{"beta": 0.3}],
    "bco": [{"beta": 0.4}],
    "cpo": [{"alpha": 0.5}],
    "orpo": [{"lam": 0.4}],
    "kto": [{}, {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}],
}
"""Settings of each kind; one without an entry is taken with its defaults."""
OPTIONS: dict[str, list[Any]] = {
    "f_divergence": [{"kind": kind} for kind in kinds(spec.FDivergenceSpec) if kind != "reverse_kl"],
    "rpo_alpha": [0.7],
    "ld_alpha": [0.3],
    "wpo": [True],
}
"""What each option may be, beside its default."""
FURTHER: list[Cell] = [
    {"losses": [{"kind": "dpo"}], "f_divergence": {"kind": "alpha", "alpha": 1.0}},
    {"losses": [{"kind": "dpo"}], "ld_alpha": 0.0},
    {"losses": [{"kind": "kto", "weight": 0.5}]},
]
SETTINGS = [{"kind": kind, **more} for kind in kinds(spec.PreferenceLossSpec) for more in BITING.get(kind, [{}])]


def cells() -> list[Cell]:
    """Every loss alone, with every one and every two options, and every two losses, weighted; what the spec refuses is left out."""
    names = [(), *((name,) for name in OPTIONS), *itertools.combinations(OPTIONS, 2)]
    found = [
        {"losses": [loss], **dict(zip(some, chosen, strict=True))}
        for loss in SETTINGS
        for some in names
        for chosen in itertools.product(*(OPTIONS[name] for name in some))
    ]
    first = [{"kind": kind, **BITING.get(kind, [{}])[0]} for kind in LOSSES]
    found += [{"losses": [{**a, "weight": 0.3}, {**b, "weight": 2.0}]} for a, b in itertools.combinations(first, 2)]
    return [cell for cell in found + FURTHER if allowed(cell)]


def allowed(cell: Cell) -> bool:
    """Whether the spec takes it."""
    try:
        spec.PreferenceSpec.model_validate(cell)
    except ValidationError:
        return False
    return True


CELLS = cells()


def expected(options: spec.PreferenceSpec, step: Step) -> tuple[Tensor, Tensor]:
    """The oracle's loss, and its gradient by the current log-probs as float64 [N]."""
    leaves = [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in side.current] for side in step.sides]
    loss = (oracle_kto if options.unpaired else oracle_pairs)(options, step.sides, leaves)
    loss.backward()
    slopes = [[0.0 if x.grad is None else float(x.grad) for x in row] for row in leaves]
    return loss.detach(), step.flat(slopes)


def oracle_pairs(options: spec.PreferenceSpec, sides: list[Side], leaves: list[list[Tensor]]) -> Tensor:
    """Mean over pairs."""
    total = torch.zeros((), dtype=torch.float64)
    for c in range(0, len(sides), 2):
        total = total + one_pair(options, sides[c : c + 2], leaves[c : c + 2])
    return total / (len(sides) // 2)


def one_pair(options: spec.PreferenceSpec, sides: list[Side], leaves: list[list[Tensor]]) -> Tensor:
    current = [
        [x for x, m in zip(row, side.trained, strict=True) if m] for side, row in zip(sides, leaves, strict=True)
    ]
    lengths = [len(row) for row in current]
    plain = [torch.stack(row).sum() for row in current]
    references = [side.kept(side.reference) for side in sides]
    summed: list[Any] = [sum(row) for row in references]
    policy: list[Any] = plain
    if options.ld_alpha is not None:
        policy, summed = (
            [oracle.ld_logprob(row, min(lengths), options.ld_alpha) for row in rows] for rows in (current, references)
        )
    loss = torch.zeros((), dtype=torch.float64)
    for choice in options.losses:
        loss = loss + choice.weight * oracle.PREFERENCE_LOSSES[choice.kind](
            policy[0], policy[1], summed[0], summed[1], lengths[0], lengths[1], oracle_options(options, choice)
        )
    loss = loss + options.rpo_alpha * -plain[0] / lengths[0]
    if options.wpo:
        numbers = [[x.item() for x in row] for row in current]
        collisions = [side.kept(side.collision) for side in sides]
        loss = oracle.wpo_weight((numbers[0], numbers[1]), (collisions[0], collisions[1])) * loss
    return loss


def oracle_options(options: spec.PreferenceSpec, choice: Any) -> dict[str, Any]:
    """A loss block in the oracle's words."""
    out = {"lambda" if name == "lam" else name: value for name, value in choice.model_dump().items()}
    out["f_divergence"] = options.f_divergence.kind
    if isinstance(options.f_divergence, spec.AlphaDivergence):
        out["f_alpha"] = options.f_divergence.alpha
    if choice.kind == "bco":
        out["delta"] = choice.beta * MEAN_LOG_RATIO
    return out


def oracle_kto(options: spec.PreferenceSpec, sides: list[Side], leaves: list[list[Tensor]]) -> Tensor:
    """The first half are completions, the second their mismatched ones."""
    (choice,) = options.losses
    ratios = [
        torch.stack([x - r for x, r, m in zip(row, side.reference, side.trained, strict=True) if m]).sum()
        for side, row in zip(sides, leaves, strict=True)
    ]
    half = len(sides) // 2
    good = [i % 3 != 1 for i in range(half)]
    return choice.weight * oracle.kto(ratios[:half], [x.item() for x in ratios[half:]], good, choice.model_dump())


def both(cell: Cell, seed: int) -> tuple[spec.PreferenceSpec, Preference | Kto, Step]:
    """The cell's options, objective and a random step."""
    options = spec.PreferenceSpec.model_validate(cell)
    step = pairs.judged_step(seed) if options.unpaired else pairs.pair_step(seed)
    return options, objective_of(options, MEAN_LOG_RATIO), step


def whole(batch: TokenBatch, objective: Preference | Kto) -> list[Tensor]:
    """One pass over everything that is trained."""
    live = objective.prepare(batch).live_rows
    return [(batch.loss_mask & live[batch.row_of_token]).nonzero()[:, 0]]


def ids(cell: Cell) -> str:
    return "+".join(loss["kind"] for loss in cell["losses"])


@pytest.mark.parametrize("number", range(len(CELLS)), ids=[f"{i}-{ids(cell)}" for i, cell in enumerate(CELLS)])
def test_a_cell_equals_the_oracle_in_value_and_gradient_for_any_split(number: int) -> None:
    options, objective, step = both(CELLS[number], seed=number)
    loss, slope = expected(options, step)
    for parts in splits(objective, step.batch):
        got, got_slope = made(objective, step.batch, step.current, parts)
        torch.testing.assert_close(got, loss, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got_slope, slope, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("number", range(0, len(CELLS), 3))
def test_row_order_changes_nothing(number: int) -> None:
    _, objective, step = both(CELLS[number], seed=number)
    loss, slope, metrics = with_metrics(objective, step.batch, step.current, whole(step.batch, objective))
    order = torch.randperm(step.batch.rows, generator=torch.Generator().manual_seed(number)).tolist()
    cuts = step.batch.cu_seqlens.tolist()
    moved = torch.cat([torch.arange(cuts[row], cuts[row + 1]) for row in order])
    shuffled = step.batch.select(order)
    got, got_slope, told = with_metrics(objective, shuffled, step.current[moved], whole(shuffled, objective))
    torch.testing.assert_close(got, loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got_slope, slope[moved], atol=1e-7, rtol=1e-5)
    assert told == pytest.approx(metrics, abs=1e-6)


@pytest.mark.parametrize("number", range(0, len(CELLS), 2))
def test_a_cell_is_finite_whatever_happens(number: int) -> None:
    _, objective, step = both(CELLS[number], seed=number)
    for sign in (torch.ones(()), -torch.ones(()), torch.where(torch.arange(step.current.numel()) % 2 == 0, 1.0, -1.0)):
        far = (step.current + 50 * sign).float()
        stats = objective.prepare(step.batch)
        (places,) = whole(step.batch, objective)
        at = far.requires_grad_()
        values = {name: value[places] for name, value in stats.values.items()}
        outputs = Outputs(at[places], collision=step.batch.extras["collision"][places])
        out = objective.loss(outputs, values, stats.weights[places], stats)
        (slope,) = torch.autograd.grad(out.loss, at)
        assert out.loss.isfinite() and slope.isfinite().all(), float(out.loss)
        assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_numbers_at_tokens_that_are_not_trained_do_not_count(kind: str) -> None:
    _, objective, step = both({"losses": [{"kind": kind}], **({"ld_alpha": 0.5} if kind == "dpo" else {})}, seed=1)
    dirty = {name: torch.where(step.batch.loss_mask, value, torch.nan) for name, value in step.batch.extras.items()}
    spoilt = replace(step.batch, extras=dirty)
    clean = made(objective, step.batch, step.current, whole(step.batch, objective))
    for value, want in zip(made(objective, spoilt, step.current, whole(spoilt, objective)), clean, strict=True):
        torch.testing.assert_close(value, want)


def test_a_pass_without_a_token_adds_nothing() -> None:
    for kind in ("dpo", "orpo", "kto"):
        _, objective, step = both({"losses": [{"kind": kind}]}, seed=2)
        (places,) = whole(step.batch, objective)
        want = made(objective, step.batch, step.current, [places])
        for got, value in zip(made(objective, step.batch, step.current, [places, places[:0]]), want, strict=True):
            assert torch.equal(got, value)


def test_every_kind_of_the_spec_is_registered_and_in_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    seen = {loss["kind"] for cell in CELLS for loss in cell["losses"]}
    assert seen == {*LOSSES, "kto"} == set(kinds(spec.PreferenceLossSpec))
    assert {*spec.DIFFERENCE_LOSSES, *spec.REFERENCE_FREE_LOSSES} <= seen
    with capsys.disabled():
        print(f"\n{len(CELLS)} cells cover {len(SETTINGS)} losses, all pairs of options, and all pairs of losses")


# -- metrics


def test_metrics_have_the_steps_denominators() -> None:
    _, objective, step = both({"losses": [{"kind": "dpo", "beta": 0.5}]}, seed=3)
    ratios = [sum(side.kept([a - b for a, b in zip(side.current, side.reference, strict=True)])) for side in step.sides]
    chosen, rejected = ratios[0::2], ratios[1::2]
    for parts in splits(objective, step.batch):
        told = with_metrics(objective, step.batch, step.current, parts)[2]
        assert told["rewards/chosen"] == pytest.approx(0.5 * sum(chosen) / len(chosen), abs=1e-5)
        assert told["rewards/rejected"] == pytest.approx(0.5 * sum(rejected) / len(rejected), abs=1e-5)
        assert told["rewards/margins"] == pytest.approx(told["rewards/chosen"] - told["rewards/rejected"], abs=1e-5)
        wins = sum(c > r for c, r in zip(chosen, rejected, strict=True))
        assert told["rewards/accuracies"] == pytest.approx(wins / len(chosen))
        sums = [sum(side.kept(side.current)) for side in step.sides]
        assert told["logps/chosen"] == pytest.approx(sum(sums[0::2]) / len(chosen), abs=1e-5)
        assert told["logps/rejected"] == pytest.approx(sum(sums[1::2]) / len(chosen), abs=1e-5)


def test_ktos_rewards_are_means_over_each_kind_of_completion() -> None:
    _, objective, step = both({"losses": [{"kind": "kto"}]}, seed=4)
    half = len(step.sides) // 2
    ratios = [sum(side.kept([a - b for a, b in zip(side.current, side.reference, strict=True)])) for side in step.sides]
    good = [0.1 * r for i, r in enumerate(ratios[:half]) if i % 3 != 1]
    for parts in splits(objective, step.batch):
        told = with_metrics(objective, step.batch, step.current, parts)[2]
        assert told["rewards/chosen"] == pytest.approx(sum(good) / len(good), abs=1e-5)
        assert told["kl"] == pytest.approx(max(0.0, sum(ratios[half:]) / half), abs=1e-5)


@pytest.mark.parametrize(
    ("losses", "measured"), [(["dpo", "simpo"], "dpo"), (["simpo", "dpo"], "dpo"), (["orpo", "cpo"], "orpo")]
)
def test_rewards_are_those_of_the_first_loss_with_a_reference(losses: list[str], measured: str) -> None:
    options = spec.PreferenceSpec.model_validate({"losses": [{"kind": kind} for kind in losses]})
    assert options.measured.kind == measured


# -- known traps


def value(cell: Cell, change: Callable[[Step], Step] = lambda step: step) -> float:
    """The loss of a random step."""
    _, objective, step = both(cell, seed=6)
    step = change(step)
    return float(made(objective, step.batch, step.current, whole(step.batch, objective))[0])


def test_dpo_label_smoothing_is_honoured() -> None:
    plain, smooth = (value({"losses": [{"kind": "dpo", "label_smoothing": e}]}) for e in (0.0, 0.3))
    assert abs(plain - smooth) > 1e-3


def test_an_offset_takes_the_margin_from_the_rewards() -> None:
    _, objective, step = both({"losses": [{"kind": "dpo", "beta": 0.5, "offset": 2.0}]}, seed=6)
    want = 0.0
    for i in range(0, len(step.sides), 2):
        u = [
            sum(side.kept([a - b for a, b in zip(side.current, side.reference, strict=True)]))
            for side in step.sides[i : i + 2]
        ]
        want -= float(oracle.ls(0.5 * (u[0] - u[1]) - 2.0 * step.batch.columns["margin"][i])) / pairs.PAIRS
    got = made(objective, step.batch, step.current, whole(step.batch, objective))[0]
    assert float(got) == pytest.approx(want, abs=1e-6)
    bare = replace(step.batch, columns={"chosen": step.batch.columns["chosen"]})
    with pytest.raises(ValueError, match="margin"):
        objective.prepare(bare)


def test_orpo_is_finite_and_still_learns_near_probability_1() -> None:
    _, objective, step = both({"losses": [{"kind": "orpo"}]}, seed=6)
    certain = torch.full_like(step.current, -1e-9).float().requires_grad_()
    stats = objective.prepare(step.batch)
    (places,) = whole(step.batch, objective)
    values = {name: v[places] for name, v in stats.values.items()}
    loss = objective.loss(Outputs(certain[places]), values, stats.weights[places], stats).loss
    (slope,) = torch.autograd.grad(loss, certain)
    assert loss.isfinite() and slope.isfinite().all() and bool((slope < 0).any())


@pytest.mark.parametrize("kind", [k for k in LOSSES if k not in spec.REFERENCE_FREE_LOSSES] + ["kto"])
def test_a_missing_reference_is_an_error(kind: str) -> None:
    _, objective, step = both({"losses": [{"kind": kind}]}, seed=6)
    bare = {name: v for name, v in step.batch.extras.items() if name != "reference"}
    with pytest.raises(ValueError, match="lacks reference"):
        objective.prepare(replace(step.batch, extras=bare))


@pytest.mark.parametrize("kind", spec.REFERENCE_FREE_LOSSES)
def test_a_loss_without_a_reference_reads_none(kind: str) -> None:
    _, objective, step = both({"losses": [{"kind": kind}]}, seed=6)
    bare = replace(step.batch, extras={})
    assert "reference" not in objective.prepare(bare).values


def test_ktos_mismatched_completions_are_read_once_and_never_trained() -> None:
    _, objective, step = both({"losses": [{"kind": "kto"}]}, seed=6)
    live = objective.prepare(step.batch).live_rows
    assert torch.equal(live, step.batch.columns["mismatched"] == 0)
    loss, slope = made(objective, step.batch, step.current, whole(step.batch, objective))
    assert not slope[~live[step.batch.row_of_token]].any()
    mismatched = ~live[step.batch.row_of_token] & step.batch.loss_mask
    moved = step.batch.extras["current"] + torch.where(mismatched, 1.0, 0.0)
    other = step.batch.with_extras(current=moved)
    assert abs(made(objective, other, step.current, whole(other, objective))[0] - loss) > 1e-3


def test_kto_keeps_its_partners_under_any_row_order() -> None:
    _, objective, step = both({"losses": [{"kind": "kto"}]}, seed=7)
    z = objective.prepare(step.batch).values["z"][0]
    assert z > 0
    for seed in range(5):
        order = torch.randperm(step.batch.rows, generator=torch.Generator().manual_seed(seed))
        shuffled = objective.prepare(step.batch.select(order)).values["z"]
        torch.testing.assert_close(shuffled, z.expand_as(shuffled))


def test_kto_needs_two_completions_mismatched_ones_and_a_first_pass() -> None:
    _, objective, step = both({"losses": [{"kind": "kto"}]}, seed=6)
    with pytest.raises(ValueError, match="at least two"):
        objective.prepare(step.batch.select([0, 5]))
    with pytest.raises(ValueError, match="needs mismatched"):
        objective.prepare(step.batch.select([0, 1]))
    bare = {name: v for name, v in step.batch.extras.items() if name != "current"}
    with pytest.raises(ValueError, match="first forward pass"):
        objective.prepare(replace(step.batch, extras=bare))


@pytest.mark.parametrize(("rows", "said"), [([0, 2, 3], "1 chosen and 0 rejected"), ([0, 1, 0, 3, 2], "")])
def test_a_group_that_is_no_pair_is_an_error(rows: list[int], said: str) -> None:
    _, objective, step = both({"losses": [{"kind": "dpo"}]}, seed=6)
    batch = step.batch.select(rows)
    if said:
        with pytest.raises(ValueError, match=said):
            objective.prepare(batch)
    else:  # two rows of one episode are one completion
        assert objective.prepare(batch).lengths.numel() == 4


def test_a_pair_stays_in_one_pass() -> None:
    _, objective, step = both({"losses": [{"kind": "dpo"}]}, seed=6)
    for parts in splits(objective, step.batch):
        seen: dict[int, int] = {}
        for number, part in enumerate(parts):
            for group in step.batch.group_id[step.batch.row_of_token[part]].tolist():
                assert seen.setdefault(group, number) == number
