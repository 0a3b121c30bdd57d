"""The distillation blocks: what they take, and what they refuse with the fix."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nemo_rl_like.spec.distill import WHOLE_VOCABULARY_LIMIT, DistillStageSpec, TeacherLogitsStageSpec, domains_of


def stage(**fields: Any) -> DistillStageSpec:
    data = {"path": "rows.jsonl", **fields.pop("data", {})}
    return DistillStageSpec.model_validate({"data": data, "teachers": [{"path": "teacher"}], **fields})


def test_the_defaults_sample_half_of_the_responses() -> None:
    made = stage()
    assert (made.beta, made.temperature, made.top_k, made.on_policy_fraction) == (0.5, 1.0, 64, 0.5)
    assert made.sampled_per_step == 32 and domains_of(made.teachers) == {None: 0}


@pytest.mark.parametrize(("fraction", "examples", "want"), [(0.5, 3, 2), (0.25, 4, 1), (1.0, 5, 5), (0.0, 5, 0)])
def test_the_share_is_rounded_to_a_whole_example(fraction: float, examples: int, want: int) -> None:
    assert stage(on_policy_fraction=fraction, examples_per_step=examples).sampled_per_step == want


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beta": 1.5}, ("beta", "less than or equal to 1")),
        ({"teachers": []}, ("give `teachers`", "`data.stored_logits`")),
        ({"teachers": [{"path": "a"}, {"path": "b"}]}, ("2 with no `domain`", "keep one of them")),
        (
            {"teachers": [{"path": "a", "domain": "x"}, {"path": "b", "domain": "x"}]},
            ("2 with the `domain` 'x'", "a domain of its own"),
        ),
        ({"data": {"stored_logits": "logits"}}, ("`on_policy_fraction` is 0.5", "set `on_policy_fraction: 0`")),
        ({"on_policy_fraction": 0.1, "examples_per_step": 4}, ("0.1 of 4", "is no example", "raise one")),
        ({"sft_coef": 0.1, "on_policy_fraction": 1.0}, ("`sft_coef` is 0.1", "every response is sampled")),
        ({"sft_coef": 0.1, "temperature": 2.0}, ("`temperature` 2.0", "at temperature 1")),
        ({"validate_every_steps": 5}, ("`validate_every_steps` is 5", "holds nothing out")),
        ({"optimizer": {"kind": "adamw", "warmup_steps": 200}}, ("optimizer.warmup_steps", "at most 100")),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        stage(**fields)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("top_k", [0, None])
def test_the_whole_vocabulary_is_told_where_it_is_small(top_k: int | None) -> None:
    made = stage(top_k=top_k)
    assert made.k_of(100) == 100
    with pytest.raises(
        ValueError, match=rf"vocabulary of 50000 tokens .* limit is {WHOLE_VOCABULARY_LIMIT}.*top_k: 64"
    ):
        made.k_of(50_000)


def test_more_tokens_than_the_vocabulary_are_refused() -> None:
    assert stage().k_of(64) == 64
    with pytest.raises(ValueError, match=r"`top_k` is 64, more than the vocabulary's 63 tokens; lower it, or set 0"):
        stage().k_of(63)


def test_storing_needs_a_teacher() -> None:
    with pytest.raises(ValidationError, match="at least 1"):
        TeacherLogitsStageSpec.model_validate({"data": {"path": "rows.jsonl"}, "teachers": []})
