"""Laws over all specs: what is written reads back equal, each key has a help text, and each typo of each key is named."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import json_schema, load_spec, resolved_yaml, spec_hash
from nemo_rl_like.spec.nearest import distance
from nemo_rl_like.spec.problems import SpecProblems
from tests.spec.full_spec import FULL, full_values

FREE = {("environment", "config"), ("secrets",)}
"""Mappings whose keys users choose."""

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029"), max_size=20)
folders = texts.filter(lambda text: text and not re.search(r"[\x00-\x1f\x7f]", text))
"""Texts that may name a folder."""
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
configs = st.dictionaries(
    texts.filter(bool),
    st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3), max_leaves=8),
    max_size=4,
)

models = st.builds(lambda text: {"init": {}, "tokenizer": {"characters": text}}, texts) | st.fixed_dictionaries(
    {"path": texts}, optional={"adapter": texts}
)
"""`model` blocks: from scratch, a folder, or a folder with adapters."""


def blocks(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], list[str]]]:
    """Every block of a spec's values whose keys are ours, with its keys."""
    if isinstance(value, dict):
        if path not in FREE:
            yield path, list(value)
        for key, below in value.items():
            yield from blocks(below, (*path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from blocks(below, (*path, index))


KEYS = [(path, key, keys) for path, keys in blocks(full_values()) for key in keys]


@st.composite
def typos(draw: st.DrawFn, word: str) -> str:
    """`word` with one letter lost, doubled, replaced or swapped with its neighbour."""
    at = draw(st.integers(0, len(word) - 1))
    kind = draw(st.sampled_from(["lose", "double", "replace", "swap"]))
    if kind == "lose":
        return word[:at] + word[at + 1 :]
    if kind == "double":
        return word[:at] + word[at] + word[at:]
    if kind == "replace":
        return word[:at] + draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_")) + word[at + 1 :]
    return word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]


def renamed(values: Any, path: tuple[str | int, ...], old: str, new: str) -> Any:
    """A copy of `values` with one key of the block at `path` renamed in place."""
    if not path:
        return {new if key == old else key: value for key, value in values.items()}
    head, rest = path[0], path[1:]
    if isinstance(values, dict):
        return {k: renamed(v, rest, old, new) if k == head else v for k, v in values.items()}
    return [renamed(v, rest, old, new) if i == head else v for i, v in enumerate(values)]


def dump(values: Any) -> str:
    return yaml.safe_dump(values, sort_keys=False)


def changed_line(before: str, after: str) -> int:
    (line,) = [
        i for i, (a, b) in enumerate(zip(before.splitlines(), after.splitlines(), strict=True), start=1) if a != b
    ]
    return line


def load_text(text: str) -> ExperimentSpec:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(text, encoding="utf-8")
        return load_spec(path)


def check_typo(path: tuple[str | int, ...], key: str, keys: list[str], typo: str) -> None:
    before, after = dump(full_values()), dump(renamed(full_values(), path, key, typo))
    with pytest.raises(SpecProblems) as caught:
        load_text(after)
    named = [p for p in caught.value.problems if p.path.split(".")[-1] == typo and p.message == "unknown key"]
    assert len(named) == 1, str(caught.value)
    (problem,) = named
    assert problem.where.source.endswith("spec.yaml")
    assert problem.where.line == changed_line(before, after)
    edits = distance(typo, key)
    rivals = [k for k in keys if k != key and distance(typo, k) <= edits]
    if not rivals:
        assert problem.suggestion == key
    elif edits <= 1:
        assert problem.suggestion in [key, *rivals]


@pytest.mark.parametrize(("path", "key", "keys"), KEYS, ids=[".".join(map(str, (*p, k))) for p, k, _ in KEYS])
def test_every_key_with_a_letter_too_many_is_named_with_its_line_and_corrected(
    path: tuple[str | int, ...], key: str, keys: list[str]
) -> None:
    check_typo(path, key, keys, key + "x")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_each_typo_of_each_key_is_named(data: st.DataObject) -> None:
    path, key, keys = data.draw(st.sampled_from(KEYS))
    typo = data.draw(typos(key))
    assume(typo and typo not in keys and typo != "extends" and yaml.safe_load(typo) == typo)
    check_typo(path, key, keys, typo)


@settings(max_examples=150, deadline=None)
@example(
    name="1e-6",
    output="0o17",
    model={"init": {}, "tokenizer": {"characters": "on"}},
    start=None,
    config={"null": "~", "1": "1", "<<": "${x}"},
    seed=1,
    lr=1e-6,
)
@example(name="no", output="1", model={"path": "1e-6", "adapter": "~"}, start="null", config={}, seed=1, lr=1.0)
@given(
    name=texts, output=folders, model=models, start=st.none() | texts, config=configs, seed=st.integers(0, 2**40), lr=st.floats(1e-12, 1e3)
)  # fmt: skip
def test_a_resolved_spec_reads_back_equal_and_has_the_same_hash(
    name: str,
    output: str,
    model: dict[str, Any],
    start: str | None,
    config: dict[str, Any],
    seed: int,
    lr: float,
) -> None:
    assume(start is None or start != model.get("adapter"))
    values = {**FULL, "name": name, "output": output, "seed": seed, "model": model}
    values["policy"] = {"lora": {"path": start}}
    values["environment"] = {"name": "x", "config": config}
    values["stages"] = [{"kind": "rl", "optimizer": {"kind": "adamw", "lr": lr}}]
    spec = ExperimentSpec.model_validate(values)
    again = load_text(resolved_yaml(spec))
    assert again == spec
    assert spec_hash(again) == spec_hash(spec)


def test_every_field_and_every_block_has_a_help_text() -> None:
    schema = json_schema()
    definitions = schema["$defs"]
    assert isinstance(definitions, dict)
    for name, block in [("ExperimentSpec", schema), *definitions.items()]:
        assert isinstance(block, dict)
        assert block.get("description"), name
        properties = block["properties"]
        assert isinstance(properties, dict)
        for field, described in properties.items():
            assert isinstance(described, dict), f"{name}.{field}"
            block_of_field = definitions.get(str(described.get("$ref")).removeprefix("#/$defs/"), {})
            assert isinstance(block_of_field, dict)
            assert described.get("description") or block_of_field.get("description"), f"{name}.{field}"
