"""vLLM's layer-wise reload, through which weights are synced, quantises a layer again: what `engine.quantization` rests on.

Its FP8 products need a GPU; `Rounded` stands in for its online FP8 method and keeps that contract: full-precision weights come in, rounded
ones and a factor stay, and a layer that has been rounded is not rounded a second time.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
pytestmark = pytest.mark.service


class Layer(torch.nn.Module):
    """A linear layer as vLLM makes it."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        class Rounded(QuantizeMethodBase):
            """Int8 in the place of FP8."""

            def create_weights(self, layer: torch.nn.Module, *args: object, **kwargs: object) -> None:
                """Made below."""

            def apply(self, layer: torch.nn.Module, *args: object, **kwargs: object) -> Tensor:
                """Not called."""
                raise NotImplementedError

            def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
                """As vllm.model_executor.layers.quantization.online.fp8 does it."""
                from vllm.model_executor.utils import replace_parameter

                if getattr(layer, "_already_called_process_weights_after_loading", False):
                    return
                assert isinstance(layer.weight, Tensor)
                scale = layer.weight.abs().amax().reshape(1) / 127
                replace_parameter(layer, "weight", (layer.weight / scale).round().to(torch.int8).data)
                replace_parameter(layer, "weight_scale", scale.data)
                layer._already_called_process_weights_after_loading = True  # type: ignore[assignment]

        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.quant_method = Rounded()

    @property
    def values(self) -> Tensor:
        """What the layer multiplies with."""
        assert isinstance(self.weight_scale, Tensor)
        return self.weight.float() * self.weight_scale


def test_each_sync_rounds_the_new_weights_by_their_own_largest_value_into_the_memory_of_the_old() -> None:
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    model = torch.nn.Sequential(Layer(), Layer())
    layerwise.record_metadata_for_reloading(model)
    draw = torch.Generator().manual_seed(1)
    for layer in model:
        layer.weight.copy_(torch.randn(8, 4, generator=draw))
        layer.quant_method.process_weights_after_loading(layer)
    places = [layer.weight.data_ptr() for layer in model]
    for size in (1.0, 50.0, 0.02):  # the old factors fit none of them
        new = [size * torch.randn(8, 4, generator=draw) for _ in model]
        layerwise.initialize_layerwise_reload(model)
        for layer, weight in zip(model, new, strict=True):
            loader = getattr(layer.weight, "weight_loader", default_weight_loader)
            loader(layer.weight, weight)
        layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
        for layer, weight in zip(model, new, strict=True):
            assert layer.weight.dtype is torch.int8
            assert (layer.values - weight).abs().max() <= weight.abs().max() / 127 / 2 * 1.001
    assert [layer.weight.data_ptr() for layer in model] == places


def test_fp8_is_asked_for_by_the_names_of_online_quantisation() -> None:
    """`fp8` itself takes quantised checkpoints only."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    from nemo_rl_like.spec.engine import EngineSpec

    asked = EngineSpec.model_fields["quantization"].annotation
    names = {name for choice in asked.__args__ for name in getattr(choice, "__args__", ())}  # type: ignore[union-attr]
    assert names and names <= set(ONLINE_QUANT_SHORTHAND_NAMES) and "fp8" not in ONLINE_QUANT_SHORTHAND_NAMES
