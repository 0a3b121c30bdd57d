"""Laws of the CPU layers' own functions: values and gradients against plain torch in float64, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_rl_like.model.attention import Rotary, rotary_of, rotate
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import hidden_states
from nemo_rl_like.model.heads import OutputHead, output_head, token_logprobs
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.layouts import plan_microbatches
from nemo_rl_like.model.local_activations import GeGlu, SquaredRelu, SwiGlu
from nemo_rl_like.model.local_layers import _SplitHeads
from nemo_rl_like.model.local_linears import _Linear
from nemo_rl_like.model.local_norms import _RmsNorm
from nemo_rl_like.model.rope import rotary_frequencies
from nemo_rl_like.spec.policy import LayoutSpec
from tests.model import tiny

GROUPS, QUERIES, WIDTH = 2, 3, 8


def assert_same(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor], tolerance: float = 1e-5
) -> None:
    """Value and every input's gradient, float32 against float64."""
    mine = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    out, expected = function(*mine), reference(*exact)
    assert torch.allclose(out.double(), expected, atol=tolerance)
    upstream = torch.randn(out.shape)
    out.backward(upstream)
    expected.backward(upstream.double())
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None and torch.allclose(x.grad.double(), y.grad, atol=tolerance * 10)


def test_rms_norm_equals_its_equation() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 2, 16) * torch.tensor([1e-3, 1.0, 50.0, 1.0, 1.0])[:, None, None], torch.randn(16)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    assert_same(lambda x, w: _RmsNorm.apply(x, w, 1e-5), reference, [x[1:], weight])
    assert_same(lambda x, w: _RmsNorm.apply(x, w, 1e-5), reference, [x[:1], weight], tolerance=1e-4)


def test_swiglu_equals_its_equation() -> None:
    torch.manual_seed(0)

    def reference(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return gate * gate.sigmoid() * up

    assert_same(SwiGlu.apply, reference, [torch.randn(7, 2, 12) * 3])


def test_geglu_equals_its_equation() -> None:
    torch.manual_seed(0)

    def reference(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return 0.5 * gate * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up

    assert_same(GeGlu.apply, reference, [torch.randn(7, 2, 12) * 3])


def test_the_square_of_relu_equals_its_equation() -> None:
    torch.manual_seed(0)
    assert_same(SquaredRelu.apply, lambda x: torch.where(x > 0, x * x, 0.0), [torch.randn(7, 2, 12) * 3])


def rotary(tokens: int, rows: int, dtype: torch.dtype) -> Rotary:
    positions = torch.randint(100, (rows, tokens), generator=torch.Generator().manual_seed(3))
    return rotary_of(positions, rotary_frequencies(WIDTH, 10000.0), dtype)


@pytest.mark.parametrize("output", [0, 1, 2])
def test_heads_are_split_and_rotated(output: int) -> None:
    torch.manual_seed(0)
    mixed = torch.randn(5, 2, GROUPS, QUERIES + 2, WIDTH)

    def mine(mixed: Tensor) -> Tensor:
        at = rotary(5, 2, torch.float32)
        return _SplitHeads.apply(mixed, at.cos, at.sin)[output]

    def reference(mixed: Tensor) -> Tensor:
        at = rotary(5, 2, torch.float64)
        query, key, value = mixed.split([QUERIES, 1, 1], dim=3)
        return (rotate(query.flatten(2, 3), at), rotate(key.squeeze(3), at), value.squeeze(3))[output]

    assert_same(mine, reference, [mixed], tolerance=1e-4)


def test_a_product_equals_plain_torch() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(5, 2, 6), torch.randn(4, 6)]
    assert_same(lambda x, w: _Linear.apply(x, w, None), lambda x, w: x @ w.t(), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_with_a_buffer_gets_its_gradient_there_and_only_there(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, upstream = torch.randn(5, 2, 6).to(dtype), torch.randn(5, 2, 4).to(dtype)
    targets = torch.randint(4, (10,))
    plain, held = (torch.nn.Parameter(torch.ones(4, 6, dtype=dtype)) for _ in range(2))
    held.main_grad = torch.full((4, 6), 7.0)  # type: ignore[attr-defined]
    for weight in (plain, held):
        _Linear.apply(x, weight, None).backward(upstream)
        out = token_logprobs(x.flatten(0, 1), OutputHead(weight, 4), targets, temperature=1.0, chunk_tokens=3)
        out.logprobs.sum().backward()
    assert held.grad is None and plain.grad is not None
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    assert torch.allclose(held.main_grad - 7.0, plain.grad.float(), atol=tolerance)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_buffers_and_plain_gradients_are_the_same_model_gradient(folders: dict[str, Path], family: str) -> None:
    batch, found = tiny.make_batch(), []
    for held in (False, True):
        config, reader = ModelConfig.from_hf_folder(folders[family]), SafetensorsReader(folders[family])
        model = build_model(config, LayoutSpec(), torch.float32, weights=reader)
        for parameter in model.parameters():
            if held:
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        for part in plan_microbatches(
            batch, range(batch.rows), dp_size=1, dp_rank=0, kind="shared_prefix", token_budget=30
        ):
            hidden = hidden_states(model, part)
            out = token_logprobs(hidden, output_head(model), part.targets, temperature=1.0, chunk_tokens=5)
            out.logprobs.sum().backward()
        found.append({name: _gradient(parameter, held) for name, parameter in model.named_parameters()})
    for name, plain in found[0].items():
        assert torch.allclose(found[1][name], plain, atol=1e-5 * max(1.0, float(plain.abs().max()))), name


def _gradient(parameter: Tensor, held: bool) -> Tensor:
    """What DDP ends with: its buffer and what autograd left."""
    left = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return left + parameter.main_grad if held else left  # type: ignore[attr-defined,no-any-return]
