"""Blocks that a command line gives are explained as a file's are, with the option as the place."""

from __future__ import annotations

import pytest

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.cli.commands.checkpoint import evaluation
from nemo_rl_like.spec.options import key_and_value
from nemo_rl_like.spec.problems import SpecProblems
from nemo_rl_like.spec.source import plain


def test_each_wrong_option_is_named_with_its_value_and_what_it_takes() -> None:
    with pytest.raises(SpecProblems) as caught:
        evaluation("tets", -3, 0, 1.0, 256)
    split, tasks = sorted(caught.value.problems, key=lambda problem: problem.path)
    assert str(caught.value).startswith("2 problems in the command line\n")
    assert (str(split.where), split.path, split.suggestion, split.allowed) == (
        "--split",
        "split",
        "test",
        "one of validation, test",
    )
    assert (str(tasks.where), tasks.path) == ("--tasks", "tasks") and "is -3" in tasks.message
    assert evaluation("test", None, 2, 0.5, 8).samples_per_task == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=no", "no"), ("a=0x1F", 31), ("a=[1, b]", [1, "b"]), ("a={b: 1}", {"b": 1}), ("a=b=c", "b=c"), ("a=", None)],
)
def test_values_are_a_specs_yaml(text: str, value: object) -> None:
    """YAML 1.2's core schema, in which `no` is a text."""
    key, node = key_and_value(text, "x=1")
    assert key == "a" and plain(node) == value and str(node.where) == f"`{text}`"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "'a' is not of the form KEY=VALUE, for example x=1"),
        ("=1", "not of the form"),
        ("a=[1", "`a=.1`: not valid YAML"),
    ],
)
def test_what_is_no_key_and_value_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        key_and_value(text, "x=1")
