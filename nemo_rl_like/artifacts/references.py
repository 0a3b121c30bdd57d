"""Functions of users by name: `file.py:function` or `pkg.mod:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_rl_like.artifacts.errors import InputError, SpecError


def load_function(reference: str, field: str) -> Callable[..., Any]:
    """The function that `reference` names; `field` is the spec's field that holds it, for messages.

    Raises:
        SpecError: the reference has no `:`, or there is no such function.
        InputError: the file or module does not exist, or cannot be imported.
    """
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise SpecError(f"{field}: {reference!r} must be `file.py:function` or `pkg.mod:function`")
    module = _load_file(Path(where), field) if where.endswith(".py") else _load_module(where, field)
    function: Callable[..., Any] | None = vars(module).get(name)
    if function is None or not callable(function):
        functions = sorted(k for k, v in vars(module).items() if inspect.isfunction(v))
        raise SpecError(f"{field}: {where} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    return function


def _load_file(file: Path, field: str) -> ModuleType:
    if not file.is_file():
        raise InputError(f"{field}: {file}: no such file")
    spec = importlib.util.spec_from_file_location(f"nrl_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InputError(f"{field}: {file}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError, NameError) as error:
        raise InputError(f"{field}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"{field}: module {error.name!r} is not installed") from error
