"""How layers attend beyond plain causal attention, from and to a Hugging Face `config.json`: windows, and how scores are scaled and capped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_like.model.families import Family, Windows
from nemo_rl_like.model.hf_fields import HfFields

if TYPE_CHECKING:  # planning reads shapes without torch
    from torch import Tensor

_FULL, _SLIDING = "full_attention", "sliding_attention"
_TYPES = "layer_types"
_SCALAR, _CAP = "query_pre_attn_scalar", "attn_logit_softcapping"


@dataclass(frozen=True, slots=True)
class Scores:
    """What a layer makes of products of queries and keys before the softmax."""

    scale: float | None = None
    """Their factor; None: 1 / sqrt(d)."""
    cap: float | None = None
    """Scores s become cap tanh(s / cap); None: they stay (Gemma 2, arXiv 2408.00118, sec. 2)."""
    window: int | None = None
    """A token attends to the last so many tokens of its row, itself among them; None: to all before it."""
    sinks: Tensor | None = None
    """[heads] a score of each head that takes a share of the softmax and gives nothing (arXiv 2309.17453; GPT-OSS); None: there is none."""


PLAIN = Scores()


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """What differs from plain causal attention in a model's layers."""

    window: int | None = None
    """Width of the window, in tokens; None: every layer attends to all."""
    windowed: tuple[bool, ...] = ()
    """Of each layer, whether it attends within the window; empty without one."""
    score_scalar: int | None = None
    """Scores are divided by its square root (`query_pre_attn_scalar`); None: by that of the width of a head."""
    score_cap: float | None = None
    """Cap of the scores."""

    def scores(self, layer: int) -> Scores:
        """Of one layer, counted from 0 over the whole model."""
        scale = None if self.score_scalar is None else self.score_scalar**-0.5
        return Scores(scale, self.score_cap, self.window if self.windowed and self.windowed[layer] else None)

    def to_hf_dict(self, family: Family) -> dict[str, object]:
        """The part of a config.json that says so, in the words of `family`."""
        found: dict[str, object] = {}
        if family.score_scalar is not None:
            found[_SCALAR] = self.score_scalar
        if family.score_cap is not None:
            found[_CAP] = self.score_cap
        windows = family.windows
        if windows is None:
            return found
        found["sliding_window"] = self.window
        if windows.switch:
            found["use_sliding_window"] = self.window is not None
        if windows.typed and self.windowed:
            found[_TYPES] = [_SLIDING if within else _FULL for within in self.windowed]
        if windows.switch and True in self.windowed:
            found["max_window_layers"] = self.windowed.index(True)
        return found


PLAIN_ATTENTION = AttentionConfig()


class AttentionReader(HfFields):
    """Reads how layers attend."""

    def config(self, family: Family, layers: int) -> AttentionConfig:
        """Of a model of so many layers. Raises InputError naming the field that is not supported."""
        if self._raw.get("use_bidirectional_attention"):
            raise self.error("use_bidirectional_attention", "is true; only causal attention is supported")
        if family.score_cap is None and self._raw.get(_CAP) is not None:
            raise self.error(_CAP, f"is {self._raw[_CAP]}; a {family.model_type} model's scores are not capped")
        window, windowed = self._window(family.windows, layers)
        scalar = None if family.score_scalar is None else self.integer(_SCALAR, family.score_scalar)
        cap = None if family.score_cap is None else self.positive(_CAP, family.score_cap)
        return AttentionConfig(window, windowed, scalar, cap)

    def _window(self, windows: Windows | None, layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """Width of the window, and of each layer whether it attends within it; (None, ()) where all attend to everything."""
        if windows is None:
            return None, ()
        named = self._named(layers) if windows.typed else None
        given = self._raw.get("sliding_window", windows.default)
        if given is None or (windows.switch and not self._raw.get("use_sliding_window")):
            if named is not None and True in named:
                raise self.error(_TYPES, f"has {_SLIDING!r}, but there is no sliding window")
            return None, ()
        width = self.integer("sliding_window", windows.default)
        windowed = self._by_rule(windows, layers) if named is None else named
        return (width, windowed) if True in windowed else (None, ())

    def _named(self, layers: int) -> tuple[bool, ...] | None:
        """What `layer_types` says."""
        kinds = self._raw.get(_TYPES)
        if kinds is None:
            return None
        if not isinstance(kinds, list) or set(kinds) - {_FULL, _SLIDING}:
            raise self.error(_TYPES, f"is {kinds!r}; supported are {_FULL} and {_SLIDING}")
        if len(kinds) != layers:
            raise self.error(_TYPES, f"has {len(kinds)} entries for {layers} layers")
        return tuple(kind == _SLIDING for kind in kinds)

    def _by_rule(self, windows: Windows, layers: int) -> tuple[bool, ...]:
        if windows.switch:
            first = self._raw.get("max_window_layers", _QWEN_FIRST)
            if not isinstance(first, int) or isinstance(first, bool) or first < 0:
                raise self.error("max_window_layers", f"is {first!r}; expected the index of a layer")
            return tuple(i >= first for i in range(layers))
        if windows.full_every is None:
            return (True,) * layers
        full_every = self.integer("sliding_window_pattern", windows.full_every)
        return tuple((i + 1) % full_every != 0 for i in range(layers))


_QWEN_FIRST = 28
"""`max_window_layers` of a config.json that does not say."""
