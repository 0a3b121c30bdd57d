"""Laws of the preference stage's spec: defaults, short forms, and combinations that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.spec.preference import (
    DIFFERENCE_LOSSES,
    REFERENCE_FREE_LOSSES,
    DpoLoss,
    PreferenceSpec,
    PreferenceStageSpec,
)
from nemo_rl_like.spec.problems import SpecProblems


def stage(**fields: Any) -> PreferenceStageSpec:
    """A stage on a file of pairs."""
    return PreferenceStageSpec.model_validate({"data": {"path": "pairs.jsonl"}, **fields})


def written(folder: Path, lines: str) -> Path:
    """A whole spec with one preference stage of these lines."""
    path = folder / "spec.yaml"
    path.write_text(
        "output: runs/x\nmodel: {init: {}, tokenizer: {characters: '01'}}\nstages:\n"
        f"  - kind: preference\n    data: {{path: pairs.jsonl}}\n{lines}"
    )
    return path


def test_the_default_is_dpo_with_a_frozen_reference() -> None:
    made = stage()
    assert made.losses == (DpoLoss(beta=0.1, label_smoothing=0.0),)
    assert made.needs_reference and not made.unpaired and made.reference_sync is None


def test_losses_may_be_written_by_name(tmp_path: Path) -> None:
    spec = load_spec(
        written(tmp_path, "    losses: [dpo, {kind: ipo, beta: 0.3, weight: 0.5}]\n    f_divergence: js\n")
    )
    (made,) = spec.stages
    assert isinstance(made, PreferenceStageSpec)
    assert made.kinds == ("dpo", "ipo") and made.losses[1].weight == 0.5 and made.f_divergence.kind == "js"


def test_a_mistyped_loss_is_named_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(SpecProblems) as caught:
        load_spec(written(tmp_path, "    losses: [{kind: dpoo}]\n"))
    (problem,) = caught.value.problems
    assert problem.suggestion == "dpo" and problem.where.line == 6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"losses": [{"kind": "kto"}], "pairs_per_step": 1}, ("`pairs_per_step` is 1", "at least 2", "32 is usual")),
        ({"losses": [{"kind": "kto"}, {"kind": "dpo"}]}, ("kto", "dpo", "keep kto alone")),
        ({"losses": [{"kind": "kto"}], "rpo_alpha": 1.0}, ("`rpo_alpha` is 1.0", "needs pairs", "leave it out")),
        ({"losses": [{"kind": "kto"}], "ld_alpha": 0.5}, ("`ld_alpha` is 0.5", "needs pairs")),
        ({"losses": [{"kind": "kto"}], "wpo": True}, ("`wpo` is True", "needs pairs")),
        ({"losses": [{"kind": "exo", "label_smoothing": 0.0}]}, ("`label_smoothing` is 0.0", "above 0", "use 0.001")),
        ({"losses": [{"kind": "dpo", "label_smoothing": 0.5}]}, ("less than 0.5",)),
        ({"losses": [{"kind": "robust", "label_smoothing": 0.5}]}, ("less than 0.5",)),
        ({"losses": []}, ("at least 1",)),
        ({"losses": [{"kind": "simpo"}], "ld_alpha": 0.5}, ("`ld_alpha` is 0.5", "simpo", "leave it out")),
        ({"losses": [{"kind": "orpo"}], "reference_sync": {}}, ("`reference_sync`", "orpo has none", "leave it out")),
        ({"data": {"path": "x", "unpair": True}}, ("`data.unpair` is true", "dpo needs pairs", "losses: [kto]")),
        (
            {"validate_every_steps": 5},
            ("`validate_every_steps` is 5", "`data.validation_fraction` is 0.0", "0.1 is usual"),
        ),
        ({"optimizer": {"kind": "adamw", "warmup_steps": 101}}, ("`optimizer.warmup_steps` is 101", "at most 100")),
        (
            {
                "losses": [{"kind": "kto"}],
                "validate_every_steps": 5,
                "validation_pairs": 1,
                "data": {"path": "x", "validation_fraction": 0.5},
            },
            ("`validation_pairs` is 1", "at least 2"),
        ),
    ],
)
def test_an_impossible_stage_is_refused_with_field_value_limit_and_fix(
    fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValidationError) as caught:
        stage(**fields)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("kind", ["sppo", "nca", "bco", "apo_zero", "apo_down", "kto", *REFERENCE_FREE_LOSSES])
def test_an_f_divergence_is_refused_where_the_loss_is_no_function_of_the_difference(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"`f_divergence` is js, but {kind} .*use `reverse_kl`"):
        PreferenceSpec.model_validate({"losses": [{"kind": kind}], "f_divergence": {"kind": "js"}})


@pytest.mark.parametrize("kind", DIFFERENCE_LOSSES)
def test_an_f_divergence_is_taken_by_losses_of_the_difference(kind: str) -> None:
    PreferenceSpec.model_validate({"losses": [{"kind": kind}], "f_divergence": {"kind": "alpha", "alpha": 0.3}})


@pytest.mark.parametrize(
    ("losses", "needs"),
    [(["simpo"], False), (["orpo", "cpo"], False), (["simpo", "dpo"], True), (["kto"], True), (["ipo"], True)],
)
def test_a_reference_is_loaded_if_one_loss_reads_it(losses: list[str], needs: bool) -> None:
    assert PreferenceSpec.model_validate({"losses": [{"kind": kind} for kind in losses]}).needs_reference == needs
