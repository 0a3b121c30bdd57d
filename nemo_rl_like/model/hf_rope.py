"""Rotary positions in a Hugging Face `config.json`: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.spec.model import LinearRope, Llama3Rope, LongRope, RopeScalingSpec, YarnRope

_BLOCKS = ("rope_parameters", "rope_scaling")
_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
_FULL, _WINDOW = "full_attention", "sliding_attention"
_OLD_NAMES = ("su", "yarn")
"""Of longrope, in files of Phi-3."""
_WINDOW_THETA = "rope_local_base_freq"


class RopeReader:
    """Reads what a config says of rotary positions. Raises InputError naming the field."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        self._raw, self._source = raw, source
        self._name, self._block = self._found()
        self._of_window: Mapping[str, object] = {}
        if _FULL in self._block:  # one block for each kind of layer
            self._of_window, self._block = self._kind(_WINDOW), self._kind(_FULL)

    @property
    def name(self) -> str:
        """Key of the block that says so."""
        return self._name

    def theta(self, default: float) -> float:
        """Base of the frequencies; `default` where the config does not say."""
        value = self._block.get("rope_theta", self._raw.get("rope_theta"))
        return default if value is None else self._number("rope_theta", value)

    def window_theta(self, default: float | None) -> float | None:
        """The same in layers with a window; `default` None: in a family whose layers all turn positions alike."""
        if default is None:
            if self._of_window:
                raise self._error(_WINDOW, "is given; positions turn alike in all layers of this family")
            return None
        if self._of_window.get("rope_type", "default") != "default":
            raise self._error(
                f"{_WINDOW}.rope_type", f"is {self._of_window['rope_type']!r}; only 'default' is supported"
            )
        value = self._of_window.get("rope_theta", self._raw.get(_WINDOW_THETA))
        return default if value is None else self._number(_WINDOW_THETA, value)

    def share(self, default: float | None) -> float:
        """Share of a head's channels that positions turn; `default` where the config does not say, None for a family that turns whole heads."""
        value = self._block.get(_SHARE, self._raw.get(_SHARE))
        found = (1.0 if default is None else default) if value is None else self._number(_SHARE, value)
        if not 0 < found <= 1 or (default is None and found != 1):
            raise self._error(_SHARE, f"is {found:g}; {'expected 1' if default is None else 'expected in (0, 1]'}")
        return found

    def scaling(self, max_positions: int, kinds: Collection[str]) -> RopeScalingSpec | None:
        """How positions are stretched, in one of `kinds`; `max_positions` is the config's own context, where the block names no trained one."""
        kind = self._block.get("rope_type", self._block.get("type", "default"))
        if kind == "default":
            return None
        if kind in _OLD_NAMES and "longrope" in kinds:
            kind = "longrope"
        if not isinstance(kind, str) or kind not in kinds:
            raise self._error("rope_type", f"is {kind!r}; supported are {', '.join(('default', *kinds))}")
        original = int(self._number(_ORIGINAL, self._block.get(_ORIGINAL, self._raw.get(_ORIGINAL, max_positions))))
        try:
            if kind == "longrope":
                return self._longrope(original)
            if kind == "linear":
                return LinearRope(factor=self._factor())
            if kind == "llama3":
                named = self._given("low_freq_factor", "high_freq_factor")
                return Llama3Rope(factor=self._factor(), original_positions=original, **named)
            more = self._given("beta_fast", "beta_slow", "attention_factor", "truncate")
            more |= {name: value for name, value in self._given("mscale", "mscale_all_dim").items() if value != 0}
            return YarnRope(factor=self._factor(max_positions / original), original_positions=original, **more)
        except ValidationError as error:
            first = error.errors()[0]
            raise self._error(".".join(str(part) for part in first["loc"]) or kind, first["msg"]) from error

    def _longrope(self, original: int) -> LongRope:
        """A `factor` counts in the attention factor alone, of which it stands in the place of the quotient of the two contexts."""
        named = self._given("short_factor", "long_factor", "attention_factor")
        if "factor" in self._block and "attention_factor" not in named:
            stretch = self._factor()
            named["attention_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        return LongRope(original_positions=original, **named)

    def require(self) -> None:
        """Raise InputError unless the config says how positions are stretched, or that they are not."""
        if "rope_type" not in self._block and "type" not in self._block:
            raise self._error(
                "rope_type", "is absent, and transformers would stretch positions in a way of its own; say how"
            )

    def _found(self) -> tuple[str, Mapping[str, object]]:
        for name in _BLOCKS:
            value = self._raw.get(name)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise InputError(f"{self._source}: {name} is {value!r}; expected an object")
            return name, value
        return _BLOCKS[0], {}

    def _kind(self, name: str) -> Mapping[str, object]:
        """What the block says of one kind of layer."""
        value = self._block.get(name) or {}
        if not isinstance(value, Mapping):
            raise self._error(name, f"is {value!r}; expected an object")
        return value

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: self._block[name] for name in names if self._block.get(name) is not None}

    def _factor(self, default: float | None = None) -> float:
        value = self._block.get("factor")
        return self._number("factor", default if value is None else value)

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(name, f"is {value!r}; expected a number")
        return float(value)

    def _error(self, name: str, what: str) -> InputError:
        return InputError(f"{self._source}: {self._name}.{name} {what}")


def rope_to_hf_dict(theta: float, scaling: RopeScalingSpec | None, share: float | None = None) -> dict[str, object]:
    """The part of a config.json that says how positions turn, for transformers 4 and 5; `share` of a head's channels, None: whole heads."""
    part: dict[str, object] = {} if share is None else {_SHARE: share}
    if scaling is None:
        return {"rope_theta": theta, **part, "rope_parameters": {"rope_theta": theta, "rope_type": "default", **part}}
    if isinstance(scaling, LongRope):
        return _longrope_to_hf_dict(theta, scaling, part)
    values = scaling.model_dump(exclude={"kind"}, exclude_none=True)
    if "original_positions" in values:
        values[_ORIGINAL] = values.pop("original_positions")
    block = {"rope_type": scaling.kind, **values, **part}
    return {"rope_theta": theta, **part, "rope_parameters": {"rope_theta": theta, **block}, "rope_scaling": block}


def _longrope_to_hf_dict(theta: float, scaling: LongRope, part: Mapping[str, object]) -> dict[str, object]:
    """transformers 4 takes a `rope_scaling` of these three keys alone, and the trained context beside it."""
    factors: dict[str, object] = {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    if scaling.attention_factor is not None:
        factors["attention_factor"] = scaling.attention_factor
    original = {_ORIGINAL: scaling.original_positions}
    block = {"rope_type": scaling.kind, **factors, **original, **part}
    return {
        "rope_theta": theta,
        **part,
        **original,
        "rope_parameters": {"rope_theta": theta, **block},
        "rope_scaling": {"type": scaling.kind, **factors},
    }


def rope_by_layer(whole: Mapping[str, object], window_theta: float) -> dict[str, object]:
    """What `rope_to_hf_dict` gives for layers that attend to everything, and the base of those with a window beside it."""
    kinds = {_FULL: whole[_BLOCKS[0]], _WINDOW: {"rope_theta": window_theta, "rope_type": "default"}}
    return {**whole, _BLOCKS[0]: kinds, _WINDOW_THETA: window_theta}
