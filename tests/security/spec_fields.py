"""Every text that a spec takes, found by walking its types, so that a new field is found too; and plain values with one text at such a place."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

INDEX, KEY, VALUE = "[]", "{key}", "{value}"
"""Steps of a path beside the names of fields: into a list, to the key and to the value of a mapping."""
Path = tuple[str, ...]
_MARKS = ("marked", "/marked", "8888:8888", "10.8.8.8")
_EXAMPLES = ("example", "/example", "7777:7777", "10.7.7.7", 1, 64, 12000, 1.5, True)


def texts(model: type[BaseModel]) -> list[Path]:
    """Paths of all texts in a model."""
    return [
        (name, *rest) for name, field in model.model_fields.items() for rest in _below(_annotation(model, name, field))
    ]


def label(path: Path) -> str:
    """The path as a person writes it."""
    return ".".join(path).replace(".[", "[").replace(".{", "{")


def mark(model: type[BaseModel], path: Path) -> str:
    """A text that the place takes, and that stands nowhere else."""
    annotation: Any = model
    for step in path:
        annotation = _into(annotation, step)
    return str(_first(_MARKS, annotation))


def placed(model: type[BaseModel], path: Path, text: str) -> dict[str, Any]:
    """Plain values of one field of a model: `text` at its place, and what the blocks around it need beside it."""
    return {path[0]: _placed(_into(model, path[0]), path[1:], text)}


def _annotation(model: type[BaseModel], name: str, field: Any) -> Any:
    """The field's type with the constraints that pydantic took out of it."""
    return Annotated[(field.annotation, field)] if field.metadata else field.annotation


def _below(annotation: Any) -> Iterator[Path]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is str:
        yield ()
    elif origin is Annotated:
        yield from _below(inner[0])
    elif origin in (Union, types.UnionType):
        for choice in inner:
            yield from _below(choice)
    elif origin in (tuple, list):
        for choice in inner:
            yield from ((INDEX, *rest) for rest in _below(choice))
    elif origin is dict:
        yield from ((KEY, *rest) for rest in _below(inner[0]))
        yield from ((VALUE, *rest) for rest in _below(inner[1]))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from texts(annotation)


def _into(annotation: Any, step: str) -> Any:
    """The type one step further."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated and get_origin(inner[0]) is not None:
        return _into(inner[0], step)
    if origin in (Union, types.UnionType):
        return next(found for choice in inner if (found := _into(choice, step)) is not None)
    if origin in (tuple, list) and step == INDEX:
        return inner[0]
    if origin is dict and step in (KEY, VALUE):
        return inner[step == VALUE]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and step in annotation.model_fields:
        return _annotation(annotation, step, annotation.model_fields[step])
    return None


def _example(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _required(annotation)
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    return _first(_EXAMPLES, annotation)


def _first(values: Sequence[Any], annotation: Any) -> Any:
    """The first that the type takes."""
    for value in values:
        try:
            TypeAdapter(annotation).validate_python(value, strict=True)
        except ValidationError:
            continue
        return value
    raise AssertionError(f"none of {values} fits {annotation}; add one that does")


def _required(model: type[BaseModel]) -> dict[str, Any]:
    fields = model.model_fields.items()
    return {name: _example(_annotation(model, name, field)) for name, field in fields if field.is_required()}


def _placed(annotation: Any, path: Path, text: str) -> Any:
    if not path:
        return text
    step, rest = path[0], path[1:]
    inner = _into(annotation, step)
    if step == INDEX:
        return [_placed(inner, rest, text)]
    if step == KEY:
        return {text: _example(_into(annotation, VALUE))}
    if step == VALUE:
        return {str(_example(_into(annotation, KEY))): _placed(inner, rest, text)}
    return {**_required(_model(annotation)), step: _placed(inner, rest, text)}


def _model(annotation: Any) -> type[BaseModel]:
    """The model in an optional or annotated one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(_model(choice) for choice in get_args(annotation) if choice is not type(None))
