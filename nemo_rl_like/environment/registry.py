"""From an `environment:` block to a source of tasks: built-in names, entry points, `pkg.mod:Class`, reward functions."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.environment.prompts import PromptFileConfig
from nemo_rl_like.environment.reward_function import RewardFunctionSource
from nemo_rl_like.environment.reward_url import RewardUrlConfig, RewardUrlSource
from nemo_rl_like.environment.types import EnvironmentConfig, EnvironmentSource
from nemo_rl_like.spec.environment import EnvironmentSpec

UNSCORED = "nemo_rl_like.environment.unscored:reward_func"
ENTRY_POINTS = "nemo_rl_like.environments"
BUILT_IN = {
    "arithmetic": "environments.arithmetic.environment:ArithmeticSource",
    "calculator": "environments.calculator.environment:CalculatorSource",
    "reasoning_gym": "environments.reasoning_gym.environment:ReasoningGymSource",
}


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """A registered environment."""

    name: str
    """What `environment.name` says."""
    target: str
    """`pkg.mod:Class`."""
    origin: str
    """`built-in`, or the package that registers it."""


def available() -> tuple[EnvironmentEntry, ...]:
    """Every registered environment, sorted by name; imports none of them. An entry point may not take a built-in name."""
    entries = [EnvironmentEntry(name, target, "built-in") for name, target in BUILT_IN.items()]
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        origin = point.dist.name if point.dist is not None else "entry point"
        if point.name in BUILT_IN:
            raise SpecError(
                f"package {origin} registers environment {point.name!r}, which is a built-in name; it must choose another"
            )
        entries.append(EnvironmentEntry(point.name, point.value, origin))
    return tuple(sorted(entries, key=lambda e: e.name))


def source_class(name: str) -> type[EnvironmentSource[Any]]:
    """The class behind a registered name or `pkg.mod:Class`.

    Raises:
        SpecError: unknown name (with the nearest ones), a module or class that does not exist, or one that is no source.
    """
    target = name if ":" in name else _registered(name)
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SpecError(f"environment.name: {name!r} needs module {error.name!r}, which is not installed") from error
    found = vars(module).get(attribute)
    if found is None:
        classes = sorted(k for k, v in vars(module).items() if inspect.isclass(v) and issubclass(v, EnvironmentSource))
        raise SpecError(
            f"environment.name: {name!r}: {module_name} has no {attribute!r}; its environments are {classes or 'none'}"
        )
    if not (inspect.isclass(found) and issubclass(found, EnvironmentSource)):
        raise SpecError(
            f"environment.name: {name!r} is not a subclass of nemo_rl_like.environment.types.EnvironmentSource"
        )
    if inspect.isabstract(found):
        raise SpecError(f"environment.name: {name!r} does not define {', '.join(sorted(found.__abstractmethods__))}")
    return found


def resolve(spec: EnvironmentSpec) -> EnvironmentSource[Any]:
    """The source that an `environment:` block describes, with its settings checked.

    Raises:
        SpecError: unknown name or settings that do not fit.
        InputError: a file that the settings name cannot be used.
    """
    if spec.name is not None:
        kind = source_class(spec.name)
        return kind(_config(spec.name, kind.config_model, spec.config))
    prompts = str(spec.prompts)
    if spec.reward_url is None:
        config = _config("reward", PromptFileConfig, spec.config)
        return RewardFunctionSource(config, reward=spec.reward or UNSCORED, prompts=prompts, label_key=spec.label_key)
    url_config = _config("reward_url", RewardUrlConfig, spec.config)
    return RewardUrlSource(
        url_config,
        url=str(spec.reward_url),
        prompts=prompts,
        label_key=spec.label_key,
        step_timeout_s=spec.step_timeout_s,
    )


def with_absolute_paths(spec: EnvironmentSpec, base: Path) -> EnvironmentSpec:
    """The same block with its files (`reward`'s, `prompts`) made absolute against `base`, so that it means the same in any process."""
    changes: dict[str, str] = {}
    if spec.prompts is not None:
        changes["prompts"] = str((base / spec.prompts).resolve())
    if spec.reward is not None:
        file, colon, function = spec.reward.rpartition(":")
        if file.endswith(".py"):
            changes["reward"] = f"{(base / file).resolve()}{colon}{function}"
    return spec.model_copy(update=changes)


def _registered(name: str) -> str:
    entries = {entry.name: entry.target for entry in available()}
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name, entries, n=3, cutoff=0.5)
    hint = f" (did you mean {' or '.join(repr(n) for n in near)}?)" if near else ""
    raise SpecError(
        f"environment.name: {name!r} is unknown{hint}; known are {', '.join(sorted(entries))}, or give `pkg.mod:Class`"
    )


def _config(name: str, model: type[EnvironmentConfig], values: dict[str, Any]) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_problem(name, model, problem["loc"], problem["msg"], problem["type"]) for problem in error.errors()]
        raise SpecError("\n".join(lines)) from error


def _problem(name: str, model: type[EnvironmentConfig], loc: tuple[int | str, ...], message: str, kind: str) -> str:
    path = ".".join(("environment.config", *map(str, loc)))
    if kind != "extra_forbidden" or len(loc) != 1:
        return f"{path}: {message} (environment {name})"
    near = difflib.get_close_matches(str(loc[0]), model.model_fields, n=1)
    hint = f" (did you mean `{near[0]}`?)" if near else ""
    return f"{path}: unknown key{hint}; the keys of {name} are {', '.join(model.model_fields) or 'none'}"
