"""Turns pydantic's errors into problems that name file, line, dotted path, nearest valid key, allowed values and help."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.spec.base import FORM
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.problems import SpecProblem
from nemo_rl_like.spec.schema_walk import Schema, Target, choices_of, describe, keys_below, locate, properties
from nemo_rl_like.spec.source import Node, Path, Position, dotted, position_of

SHOWN_CHARACTERS = 60
_OF_KEY = "[key]"
"""Last part of pydantic's location of an error in a name."""
_NOT_TAKEN = "not of the form that is taken here"
_SECRET = (
    "is not as it must be, and is not repeated here, for it may be the secret itself; write {env: NAME}, with the name of the variable that "
    "holds it"
)


def explain(error: ValidationError, root: Node, schema: Schema) -> list[SpecProblem]:
    """One problem for each error of `error`, in the order of the lines.

    Args:
        error: what pydantic said about `root`.
        root: the spec as written, parents merged and references replaced.
        schema: JSON Schema of the model that refused it.
    """
    details = error.errors(include_url=False)
    locations = [tuple(d["loc"]) for d in details]
    problems = [
        _explain_one(detail, root, schema)
        for detail, loc in zip(details, locations, strict=True)
        if not _follows_from_others(detail, loc, locations)
    ]
    return sorted(problems, key=lambda p: (p.where.source, p.where.line or 0))


def _follows_from_others(detail: ErrorDetails, loc: Path, locations: Sequence[Path]) -> bool:
    """A list is called too short when its bad items were dropped: the items' own errors say it all."""
    return detail["type"] == "too_short" and any(len(o) > len(loc) and o[: len(loc)] == loc for o in locations)


def _explain_one(detail: ErrorDetails, root: Node, schema: Schema) -> SpecProblem:
    if detail["loc"][-1:] == (_OF_KEY,):
        return _bad_key(detail, root, schema)
    target = locate(schema, tuple(detail["loc"]))
    where = position_of(root, target.path)
    path = dotted(root, target.path)
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(target, where, path, schema)
        case "missing":
            message = "this key is required but not given"
            return SpecProblem(where, path, message, None, describe(target.schema, schema), _help(target))
        case "union_tag_invalid" | "union_tag_not_found":
            return _bad_kind(detail, target, root)
        case "value_error":
            words = str(detail["msg"]).removeprefix("Value error, ")
            return SpecProblem(_named_in(words, root, target.path) or where, path or "spec", words)
    if target.path[:1] == ("secrets",):
        return SpecProblem(where, path, _SECRET, None, describe(target.schema, schema), _help(target))
    message = f"is {_shown(detail['input'])}: {_wrong(detail)}"
    suggestion = nearest(detail["input"], choices_of(target.schema)) if isinstance(detail["input"], str) else None
    return SpecProblem(where, path or "spec", message, suggestion, describe(target.schema, schema), _help(target))


def _named_in(words: str, root: Node, path: Path) -> Position | None:
    """Where the first key of the block stands that an error about the whole block names and somebody wrote."""
    for name in re.findall(r"`(\w+)[`:]", words):
        if position_of(root, (*path, name)) != position_of(root, path):
            return position_of(root, (*path, name))
    return None


def _bad_key(detail: ErrorDetails, root: Node, schema: Schema) -> SpecProblem:
    """A name that a block of any names does not take."""
    path = tuple(detail["loc"][:-1])
    return SpecProblem(
        position_of(root, path),
        dotted(root, path),
        f"the name {_shown(detail['input'])} is {_NOT_TAKEN}",
        None,
        _names_of(path, schema),
    )


def _names_of(path: Path, schema: Schema) -> str | None:
    """Names that the block above `path` takes, in words."""
    names = locate(schema, path).parent.get("propertyNames")
    words = names.get(FORM) if isinstance(names, dict) else None
    return words if isinstance(words, str) else None


def _unknown_key(target: Target, where: Position, path: str, schema: Schema) -> SpecProblem:
    """An unknown key: the nearest key of its block, or the block nearby that has a key of this very name."""
    key = str(target.path[-1])
    known = properties(target.parent)
    suggestion = nearest(key, known) or _in_a_block_below(key, target.parent, schema) or _anywhere(key, schema)
    near = known.get(suggestion or "", {}).get("description")
    help_text = f"{suggestion}: {near}" if isinstance(near, str) else None
    return SpecProblem(where, path, "unknown key", suggestion, "the keys here are " + ", ".join(known), help_text)


def _in_a_block_below(key: str, block: Schema, schema: Schema) -> str | None:
    """`optimizer.lr` for an `lr` that was written one level too high."""
    for name, field in properties(block).items():
        if key in keys_below(field, schema):
            return f"{name}.{key}"
    return None


def _anywhere(key: str, schema: Schema) -> str | None:
    """Path of a key of this name from the top of the spec."""
    if key in properties(schema):
        return f"{key} at the top level"
    return _in_a_block_below(key, schema, schema)


def _bad_kind(detail: ErrorDetails, target: Target, root: Node) -> SpecProblem:
    """A list item whose `kind` is missing, mistyped or unknown."""
    path = (*target.path, "kind")
    kinds = _names(target.schema.get("discriminator"))
    item = detail["input"] if isinstance(detail["input"], dict) else {}
    value = item.get("kind")
    mistyped = nearest("kind", item) if value is None else None
    if mistyped is not None:
        path = (*target.path, mistyped)
        return SpecProblem(position_of(root, path), dotted(root, path), "unknown key", "kind")
    message = "this key is required but not given" if value is None else f"unknown kind {_shown(value)}"
    suggestion = nearest(value, kinds) if isinstance(value, str) else None
    return SpecProblem(position_of(root, path), dotted(root, path), message, suggestion, "one of " + ", ".join(kinds))


def _names(discriminator: JSON) -> list[str]:
    mapping = discriminator.get("mapping") if isinstance(discriminator, dict) else None
    return list(mapping) if isinstance(mapping, dict) else []


def _help(target: Target) -> str | None:
    text = target.schema.get("description")
    return text if isinstance(text, str) else None


def _shown(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def _wrong(detail: ErrorDetails) -> str:
    """What is wrong with a value, in words."""
    if detail["type"] == "string_pattern_mismatch":
        return _NOT_TAKEN
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        return "must be text; put it in quotes"
    return _lower_first(str(detail["msg"]))


def _lower_first(text: str) -> str:
    text = (
        text.removeprefix("Input should be ").replace("a valid dictionary", "a block").replace("an object", "a block")
    )
    text = (
        text.replace("a valid array", "a list")
        .replace("a valid integer", "a whole number")
        .replace("a valid boolean", "true or false")
    )
    return f"must be {text}" if not text.startswith(("Tuple", "Value", "String")) else text[0].lower() + text[1:]
