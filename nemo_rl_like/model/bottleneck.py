"""Bottleneck adapters: a narrow feed-forward layer behind attention and the feed-forward layer, or beside the latter.

Houlsby et al. 2019 (arXiv 1902.00751) put one behind both, Pfeiffer et al. 2021 (arXiv 2005.00247) behind the feed-forward layer alone, He et al. 2022
(arXiv 2110.04366) beside it. A(x) = s (W_up f(W_down x + b_down) + b_up); behind a layer that gives z the residual stream gets z + A(z), beside one
that reads x it gets z + A(x). Every tensor-parallel rank has an adapter whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.scratch import DrawnReader
from nemo_rl_like.model.weight_entries import BOTTLENECK, Entry
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.policy import BottleneckActivation, BottleneckSpec

_FUNCTIONS: Mapping[BottleneckActivation, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
_BLOCKS = {"self_attention": "self_attn", "mlp": "mlp"}
"""Hugging Face's names of the parts of a layer."""
_PARTS = ("down.weight", "down.bias", "up.weight", "up.bias")


class Bottleneck(nn.Module):
    """One adapter, of a part of a layer that gives (output, bias left to the caller)."""

    def __init__(self, spec: BottleneckSpec, hidden: int, dtype: torch.dtype, *, sequence_parallel: bool) -> None:
        """`hidden`: width of the residual stream; `sequence_parallel`: each tensor-parallel rank sees a part of the sequence."""
        super().__init__()
        width, device = spec.width_in(hidden), runtime.device()
        self.down = nn.Linear(hidden, width, dtype=dtype, device=device)
        self.up = nn.Linear(width, hidden, dtype=dtype, device=device)
        self.enabled = True
        self._between, self._scale, self._beside = _FUNCTIONS[spec.activation], spec.scale, spec.placement == "parallel"
        for parameter in self.parameters() if sequence_parallel else ():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]  # Megatron then sums its gradient over those ranks

    def forward(self, x: Tensor) -> Tensor:
        """A(x), [..., H] -> the same shape."""
        out: Tensor = self.up(self._between(self.down(x)))
        return out * self._scale

    def add(self, part: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> object:
        """Forward hook of the part."""
        if not self.enabled:
            return outputs
        out, bias = outputs
        return out + self(inputs[0] if self._beside else out), bias


def add_bottlenecks(model: MegatronModel, config: ModelConfig, spec: BottleneckSpec, seed: int) -> None:
    """Put adapters on every layer of the model, which is frozen. They are drawn from `seed`, the same at every layout, and add nothing yet.

    Raises InputError for a width that the model has not.
    """
    check_bottleneck(config, spec)
    model.requires_grad_(False)
    for layer in model.layers:
        for name in _adapted_parts(spec):
            part = layer.get_submodule(name)
            part.bottleneck = Bottleneck(
                spec, config.hidden_size, model.dtype, sequence_parallel=model.config.sequence_parallel
            )
            part.register_forward_hook(part.bottleneck.add)
    bottlenecks = BottleneckMap(config, spec)
    bottlenecks.mark_shards(model)
    bottlenecks.load_hf(model, FreshBottlenecks(bottlenecks, seed))


def check_bottleneck(config: ModelConfig, spec: BottleneckSpec) -> None:
    """Raise InputError for a `reduction` that does not give a width, and for a width that narrows nothing."""
    hidden = config.hidden_size
    if spec.width is None and hidden % spec.reduced_by:
        raise InputError(
            f"policy.adapter.reduction is {spec.reduced_by}, which does not divide the model's hidden_size ({hidden}); use another, or set `width`"
        )
    if spec.width_in(hidden) > hidden:
        raise InputError(
            f"policy.adapter.width is {spec.width}, more than the model's hidden_size ({hidden}); lower it, or train the whole model"
        )


class BottleneckMap(WeightMap):
    """Names of files <-> this rank's adapters."""

    def __init__(self, config: ModelConfig, spec: BottleneckSpec) -> None:
        super().__init__(config, tuple(_entries(config, spec)))

    def owns(self, name: str) -> bool:
        """Whether a Megatron parameter belongs to this map."""
        return f".{BOTTLENECK}" in name


class FreshBottlenecks(DrawnReader):
    """New adapters: W_down uniform within +-1 / sqrt(H), all else zero, so that the model is its base."""

    def __init__(self, bottlenecks: BottleneckMap, seed: int) -> None:
        super().__init__(bottlenecks.hf_shapes(), seed, "new bottleneck adapters")

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The tensor, float32."""
        if not name.endswith("down.weight"):
            return torch.zeros(shape)
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _adapted_parts(spec: BottleneckSpec) -> tuple[str, ...]:
    """Parts of a layer that have an adapter."""
    return tuple(_BLOCKS) if spec.placement == "houlsby" else ("mlp",)


def _entries(config: ModelConfig, spec: BottleneckSpec) -> Iterator[Entry]:
    hidden, width = config.hidden_size, spec.width_in(config.hidden_size)
    shapes = dict(zip(_PARTS, ((width, hidden), (width,), (hidden, width), (hidden,)), strict=True))
    for layer in range(config.layers):
        for part in _adapted_parts(spec):
            block = f"model.layers.{layer}.{_BLOCKS[part]}.{BOTTLENECK}"
            for name, shape in shapes.items():
                yield Entry("whole", (f"{block}{name}",), (shape,), (f"{part}.{BOTTLENECK}{name}",), layer)
