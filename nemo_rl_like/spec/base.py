"""The base of every spec model: frozen, no unknown keys, help on every field."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

FORM = "$comment"
"""Key of a JSON Schema under which a pattern stands in words."""


class Spec(BaseModel):
    """A frozen block of the experiment spec; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


def form(pattern: str, words: str, *, max_length: int | None = None) -> Any:
    """A text's pattern for `Annotated`, with the words in which errors tell it."""
    return Field(pattern=pattern, max_length=max_length, json_schema_extra={FORM: words})
