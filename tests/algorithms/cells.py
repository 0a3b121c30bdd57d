"""Cells of the contract: algorithm blocks that cover every choice and every pair of choices of the registry."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from nemo_rl_like.spec.advantages import AdvantageSpec
from nemo_rl_like.spec.algorithm import AlgorithmSpec
from nemo_rl_like.spec.corrections import CorrectionSpec
from nemo_rl_like.spec.policy_losses import SEQUENCE_LOSSES, AggregationSpec, PolicyLossSpec
from nemo_rl_like.spec.shaping import ShapingSpec

Cell = dict[str, Any]

BITING: dict[str, dict[str, Any]] = {
    "gspo": {"low": 0.05, "high": 0.05},
    "gspo_token": {"low": 0.05, "high": 0.05},
    "gmpo": {"low": 0.2, "high": 0.2},
    "cispo": {"cap": 1.2},
    "kl_cov": {"fraction": 0.2},
    "clip_cov": {"fraction": 0.2, "cov_low": -0.5, "cov_high": 2.0},
    "icepop": {"low": 0.8, "high": 1.3},
    "tis": {"cap": 1.1},
    "sequence_tis": {"cap": 1.1},
    "sequence_mask": {"low": 0.6, "high": 1.6},
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "overlong": {"cache": 3},
    "length_penalty": {"coef": 0.01, "free_tokens": 2},
    "stop_properly": {"coef": 0.5},
    "scale": {"factor": 2.0},
    "sequence_mean_token_sum_norm": {"length": 9},
    "pass_at_k": {"k": 2},
    "reinforce_pp": {"gamma": 0.9},
    "reinforce_pp_baseline": {"gamma": 0.9},
    "gae": {"gamma": 0.9, "bootstrap_truncated": True},
    "vapo": {"gamma": 0.9, "alpha": 0.5},
}
"""Numbers under which a choice does something on batches of a few tokens; a kind without an entry is taken with its defaults."""

FURTHER: dict[str, list[dict[str, Any]]] = {
    "policy_loss": [{"kind": "clip", "dual": 1.5}, {"kind": "clip", "delta": 1.3, "high": 0.28}],
    "shaping": [{"kind": "stop_properly", "coef": -1.0}, {"kind": "win_rate", "compare": "sign"}],
    "advantage": [{"kind": "gdpo", "weights": {"format": 0.5}}, {"kind": "gae", "whiten": False}],
}
"""Further settings of kinds that have more than one behaviour."""

SWITCHES: dict[str, list[Any]] = {
    "kl": [
        {},
        *({"coef": 0.3, "estimator": e} for e in ("k2", "k3")),
        *({"coef": 0.3, "estimator": e, "unbiased": True} for e in ("k1", "k2", "k3")),
        {"coef": 0.3, "estimator": "k1", "place": "reward"},
    ],
    "mask_truncated": [False, True],
    "top_entropy": [None, 0.3],
    "entropy_coef": [0.0, 0.2],
    "distill_coef": [0.0, 0.5],
    "positive_nll_coef": [0.0, 0.1],
}
"""Choices that are not kinds."""


def kinds(annotation: Any) -> list[str]:
    """The kinds of a tagged union, as the spec declares them."""
    union = get_args(annotation)[0]
    return [member.model_fields["kind"].default for member in get_args(union) if issubclass(member, BaseModel)]


def axes() -> dict[str, list[Any]]:
    """Every axis with its settings, read from the spec's unions."""
    out: dict[str, list[Any]] = {
        "advantage": _settings("advantage", AdvantageSpec),
        "policy_loss": _settings("policy_loss", PolicyLossSpec),
        "aggregation": _settings("aggregation", AggregationSpec),
        "correction": [[], *([c] for c in _settings("correction", CorrectionSpec))],
        "shaping": [[], *([c] for c in _settings("shaping", ShapingSpec))],
    }
    out["correction"].append([{"kind": "tis"}, {"kind": "geometric_mask", **BITING["geometric_mask"]}])
    return out | SWITCHES


def _settings(axis: str, annotation: Any) -> list[dict[str, Any]]:
    return [{"kind": kind, **BITING.get(kind, {})} for kind in kinds(annotation)] + FURTHER.get(axis, [])


def allowed(cell: Mapping[str, Any]) -> AlgorithmSpec | None:
    """The block of a cell, or None if it is refused: by the spec, or because maxrl takes no reward that shaping made negative."""
    lowered = any(s.get("coef", 0) < 0 or s["kind"] == "win_rate" for s in cell.get("shaping", ()))
    if cell.get("advantage") == {"kind": "maxrl"} and lowered:
        return None
    try:
        return AlgorithmSpec.model_validate(dict(cell))
    except ValidationError:
        return None


def covering(seed: int = 0) -> Iterator[Cell]:
    """Cells in which every pair of settings that the spec allows occurs: greedy, one cell at a time."""
    table, draw = axes(), random.Random(seed)
    names = list(table)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(table[a])), range(len(table[b])))
    }
    while open_pairs:
        first = min(open_pairs)
        chosen = _complete(table, dict(first), open_pairs, draw)
        if chosen is None:
            open_pairs.discard(first)
            continue
        open_pairs -= set(_pairs(chosen, names))
        yield {name: table[name][i] for name, i in chosen.items()}


def _complete(
    table: Mapping[str, list[Any]], fixed: dict[str, int], open_pairs: set[Any], draw: random.Random
) -> dict[str, int] | None:
    """The best of some random orders of filling the other axes, each with the setting that closes most open pairs."""
    names, best, best_gain = list(table), None, -1
    for _ in range(4):
        chosen = dict(fixed)
        order = [name for name in names if name not in chosen]
        draw.shuffle(order)
        for name in order:
            options = list(range(len(table[name])))
            draw.shuffle(options)
            options.sort(key=lambda i: -_gain({**chosen, name: i}, name, names, open_pairs))
            found = next((i for i in options if allowed(_written(table, {**chosen, name: i}, names))), None)
            if found is None:
                break
            chosen[name] = found
        else:
            gain = sum(pair in open_pairs for pair in _pairs(chosen, names))
            if gain > best_gain:
                best, best_gain = chosen, gain
    return best


def _written(table: Mapping[str, list[Any]], chosen: Mapping[str, int], names: list[str]) -> Cell:
    """The cell so far. An axis that is still open takes what the closed ones need."""
    cell = {name: table[name][i] for name, i in chosen.items()}
    sequence = cell.get("policy_loss", {}).get("kind") in SEQUENCE_LOSSES
    if sequence and "aggregation" not in cell:
        cell["aggregation"] = {"kind": "sequence_mean"}
    if cell.get("aggregation", {}).get("kind") == "sequence_mean" and "policy_loss" not in cell:
        cell["policy_loss"] = {"kind": "gspo"}
    return cell


def _gain(chosen: Mapping[str, int], new: str, names: list[str], open_pairs: set[Any]) -> int:
    return sum(pair in open_pairs for pair in _pairs(chosen, names) if new in (pair[0][0], pair[1][0]))


def _pairs(chosen: Mapping[str, int], names: list[str]) -> Iterator[Any]:
    present = [(name, chosen[name]) for name in names if name in chosen]
    return itertools.combinations(present, 2)
