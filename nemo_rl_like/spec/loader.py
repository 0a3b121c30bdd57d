"""Loads an experiment spec: file and its parents, overrides, references, types. `load_spec` is the one way in."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import cast

import yaml
from pydantic import ValidationError

from nemo_rl_like.artifacts.hashing import JSON, hash_json
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.explain import explain
from nemo_rl_like.spec.extends import KEY as EXTENDS
from nemo_rl_like.spec.extends import read_with_parents
from nemo_rl_like.spec.interpolate import escape, interpolate
from nemo_rl_like.spec.overrides import apply_overrides
from nemo_rl_like.spec.presets import with_presets
from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.schema_walk import kinds_of
from nemo_rl_like.spec.secret_names import is_secret_value
from nemo_rl_like.spec.settings import with_settings
from nemo_rl_like.spec.shorthand import with_blocks, with_kinds
from nemo_rl_like.spec.source import Node, Path, dotted, plain
from nemo_rl_like.spec.yaml_reader import install_core_schema

_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|password|passwd|secret|private_key|(access|auth|api|bearer|hf|hub|github|refresh)_token)s?$|^token$",
    re.IGNORECASE,
)
_FREE = ("environment", "config")
"""Where a spec takes any key."""


class _Dumper(yaml.SafeDumper):
    """Writes what the reader reads: quotes text that YAML 1.2 would take for something else; no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


install_core_schema(_Dumper)


def load_spec(path: FilePath | str, overrides: Sequence[str] = ()) -> ExperimentSpec:
    """The experiment that a YAML file describes.

    Args:
        path: the file; its `extends:` parents are relative to it.
        overrides: `a.b.c=value`, applied in order before references are replaced.

    Raises:
        SpecProblems (a SpecError): lists every problem with file, line, path, nearest key, allowed values and help.
    """
    return load_with_places(path, overrides)[0]


def load_with_places(path: FilePath | str, overrides: Sequence[str] = ()) -> tuple[ExperimentSpec, Node]:
    """As `load_spec`, with the values as they were written and where: parents merged, presets and references filled in, no defaults."""
    schema = _model_schema()
    written = apply_overrides(read_with_parents(FilePath(path), _written_out), overrides)
    written = with_settings(with_presets(_written_out(written), _written_out))
    _refuse_plain_secrets(written)
    root = with_kinds(interpolate(written), schema)
    try:
        return ExperimentSpec.model_validate_json(json.dumps(plain(root)), strict=True), root
    except ValidationError as error:
        raise SpecProblems(explain(error, root, schema)) from None


def resolved_yaml(spec: ExperimentSpec) -> str:
    """The whole spec with every default, as YAML that `load_spec` reads back to an equal spec."""
    values = _escaped(spec.model_dump(mode="json"))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def spec_hash(spec: ExperimentSpec) -> str:
    """SHA-256 (hex) of everything in the spec but `output` and `launch`: equal experiments in two places have one hash."""
    return hash_json(spec.model_dump(mode="json", exclude={"output", "launch"}))


def json_schema() -> dict[str, JSON]:
    """JSON Schema (2020-12) of a spec file, for editors; a file with `extends` need not repeat required keys."""
    schema = cast(dict[str, JSON], _with_short_choices(_model_schema()))
    required = schema.pop("required")
    names: dict[str, JSON] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    names["description"] = "Spec file or files that this one starts from, relative to it."
    properties = schema["properties"]
    assert isinstance(properties, dict) and isinstance(properties["stages"], dict)
    by_name = {"type": "object", "description": "With `extends`: changes of its stages, by name or kind."}
    properties["stages"] = {
        "description": properties["stages"].pop("description"),
        "anyOf": [properties["stages"], by_name],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {EXTENDS: names, **properties},
        "anyOf": [{"required": [EXTENDS]}, {"required": required}],
    }


def _written_out(node: Node) -> Node:
    """A spec, or a part of one from the top, with its short choices as blocks."""
    return with_blocks(node, _model_schema())


@functools.cache
def _model_schema() -> dict[str, JSON]:
    return ExperimentSpec.model_json_schema()


def _with_short_choices(schema: JSON) -> JSON:
    """A copy in which every tagged union may also be written as the text of a `kind`."""
    if isinstance(schema, Mapping):
        out: dict[str, JSON] = {key: _with_short_choices(value) for key, value in schema.items()}
        kinds = kinds_of(schema)
        if kinds:
            union = {key: out.pop(key) for key in ("oneOf", "discriminator")}
            out["anyOf"] = [{"enum": list(kinds)}, union]
        return out
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_with_short_choices(item) for item in schema]
    return schema


def _escaped(value: JSON) -> JSON:
    """`value` with `${` in its texts escaped."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_escaped(item) for item in value]
    return value


def _refuse_plain_secrets(root: Node) -> None:
    """Secrets that are written out: by the shape of their value anywhere, by their key's name where environments take any key."""
    message = "looks like a secret in plain text; list it under `secrets` as {env: NAME}, set the variable NAME, and remove it here"
    problems = [
        SpecProblem(node.where, dotted(root, path), message)
        for path, node in _leaves(root, ())
        if isinstance(node.value, str)
        and (is_secret_value(node.value) or (path[:2] == _FREE and _SECRET_KEY.search(str(path[-1]))))
    ]
    if problems:
        raise SpecProblems(problems)


def _leaves(node: Node, path: Path) -> list[tuple[Path, Node]]:
    """Every value below `node` that is neither a mapping nor a list, with its path."""
    if isinstance(node.value, dict):
        return [leaf for key, below in node.value.items() for leaf in _leaves(below, (*path, key))]
    if isinstance(node.value, list):
        return [leaf for i, below in enumerate(node.value) for leaf in _leaves(below, (*path, i))]
    return [(path, node)]
