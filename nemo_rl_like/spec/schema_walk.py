"""Finds and describes fields in a JSON Schema made by pydantic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.spec.base import FORM
from nemo_rl_like.spec.source import Path

Schema: TypeAlias = Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class Target:
    """What a pydantic error location means."""

    path: Path
    """Path in the file: the location without union tags."""
    schema: Schema
    """Schema of the value there; empty for an unknown key."""
    parent: Schema
    """Schema of the block that holds it."""


def locate(root: Schema, loc: Path) -> Target:
    """The field that an error location means, in the schema `root`."""
    path: Path = ()
    schema, parent = root, root
    for part in loc:
        block = _block(schema, root)
        tagged = _tagged(block, part, root)
        if tagged is not None:
            schema = tagged
            continue
        path, parent = (*path, part), block
        schema = _entry(block, part)
    return Target(path, schema, parent)


def properties(schema: Schema) -> dict[str, Schema]:
    """The keys of a block with their schemas."""
    found = schema.get("properties")
    if not isinstance(found, Mapping):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, Mapping)}


def keys_below(schema: Schema, root: Schema) -> set[str]:
    """The keys of the block that a field holds, of every kind of it where there are several; empty when it holds none."""
    block = _block(schema, root)
    blocks = [_deref({"$ref": reference}, root) for reference in kinds_of(block).values()] or [block]
    return {key for one in blocks for key in properties(one)}


def resolved(schema: Schema, root: Schema) -> Schema:
    """The block, list or tagged union that a field holds; `schema` itself when it holds none."""
    return _block(schema, root)


def kinds_of(schema: Schema) -> Mapping[str, str]:
    """The members of a tagged union, by tag, as references; empty when `schema` is none."""
    discriminator = schema.get("discriminator")
    mapping = discriminator.get("mapping") if isinstance(discriminator, Mapping) else None
    return {k: v for k, v in mapping.items() if isinstance(v, str)} if isinstance(mapping, Mapping) else {}


def entry_of(block: Schema, part: str | int, root: Schema) -> Schema:
    """Schema of the entry `part` of a block or list, which may be one of a tagged union; empty when there is none."""
    return _deref(_entry(block, part), root)


def describe(field: Schema, root: Schema) -> str:
    """What a field takes, in words: type, range, choices, keys."""
    field = _deref(field, root)
    choices = field.get("enum")
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return "one of " + ", ".join(str(c) for c in choices)
    if "const" in field:
        return str(field["const"])
    kinds = kinds_of(field)
    if kinds and "items" not in field:
        return f"one of {', '.join(kinds)}, or a block with such a `kind` and its numbers"
    branches = _schemas(field.get("anyOf")) or _schemas(field.get("oneOf"))
    if branches:
        return " or ".join(describe(b, root) for b in branches)
    match field.get("type"):
        case "object":
            keys = ", ".join(properties(field))
            return f"a block with the keys {keys}" if keys else "a block"
        case "array":
            return _describe_list(field, root)
        case "integer":
            return "a whole number" + _range(field)
        case "number":
            return "a number" + _range(field)
        case "boolean":
            return "true or false"
        case "string":
            words = field.get(FORM, f"text of the form {field['pattern']}" if "pattern" in field else "text")
            return str(words)
        case "null":
            return "null"
    return "any value"


def choices_of(field: Schema) -> list[str]:
    """The text values that a field may have, when they are listed."""
    choices = field.get("enum")
    listed = choices if isinstance(choices, Sequence) and not isinstance(choices, str) else []
    own = [c for c in listed if isinstance(c, str)]
    return own + [c for branch in _schemas(field.get("anyOf")) for c in choices_of(branch)]


def _describe_list(field: Schema, root: Schema) -> str:
    fixed = _schemas(field.get("prefixItems"))
    if fixed:
        return f"a list of {len(fixed)}: {', '.join(describe(s, root) for s in fixed)}"
    item = field.get("items")
    return "a list, each item " + (describe(item, root) if isinstance(item, Mapping) else "any value")


def _range(field: Schema) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return "".join(f" {sign} {field[key]}" for key, sign in signs.items() if key in field)


def _schemas(value: JSON) -> list[Schema]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [v for v in value if isinstance(v, Mapping)]
    return []


def _deref(schema: Schema, root: Schema) -> Schema:
    """Follow `$ref`; texts beside the reference (description, default) are kept."""
    name = schema.get("$ref")
    definitions = root.get("$defs")
    if not isinstance(name, str) or not isinstance(definitions, Mapping):
        return schema
    target = definitions[name.removeprefix("#/$defs/")]
    return (
        _deref({**target, **{k: v for k, v in schema.items() if k != "$ref"}}, root)
        if isinstance(target, Mapping)
        else schema
    )


def _block(schema: Schema, root: Schema) -> Schema:
    """The branch of a field that holds other fields: null and scalars beside it are passed over."""
    schema = _deref(schema, root)
    for branch in _schemas(schema.get("anyOf")):
        resolved = _deref(branch, root)
        if resolved.get("type") in ("object", "array") or kinds_of(resolved):
            return resolved
    return schema


def _tagged(schema: Schema, part: str | int, root: Schema) -> Schema | None:
    """The member of a tagged union that `part` names; None when `schema` is no such union."""
    reference = kinds_of(schema).get(str(part))
    return None if reference is None else _deref({"$ref": reference}, root)


def _entry(block: Schema, part: str | int) -> Schema:
    """Schema of the entry `part` of a block or list; empty when there is none."""
    if isinstance(part, str):
        known, patterns = properties(block), block.get("patternProperties")
        of_any_name = list(patterns.values()) if isinstance(patterns, Mapping) else []
        further = [value for value in (block.get("additionalProperties"), *of_any_name) if isinstance(value, Mapping)]
        return known.get(part, further[0] if further else {})
    fixed = _schemas(block.get("prefixItems"))
    if part < len(fixed):
        return fixed[part]
    item = block.get("items")
    return item if isinstance(item, Mapping) else {}
