"""NF4: bitsandbytes' levels, blocks and values to the bit, the nearest of its 8-bit levels for scales, and which models have no whole blocks."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.nf4 import DoubleScales, Nf4Weight, doubly, quantized, tree_levels
from nemo_rl_like.model.nf4_map import GROUP, check_nf4
from nemo_rl_like.spec.policy import LayoutSpec

SHAPES = ((48, 128), (200, 640))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Random, with a block of zeros."""
    drawn = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    drawn[3, 64:128] = 0
    return drawn.to(dtype)


def held(whole: Tensor, *, double: bool) -> Nf4Weight:
    found = Nf4Weight(whole)
    found.double_scales = double
    found.quantize([whole], lambda wholes: wholes[0])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_scales_and_values_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    whole = matrix(shape, dtype)
    codes, state = bnb.quantize_4bit(whole, blocksize=64, quant_type="nf4")
    mine = held(whole, double=False)
    assert torch.equal(mine.data.flatten(), codes.flatten())
    assert isinstance(mine.scales, Tensor) and torch.equal(mine.scales.flatten(), state.absmax)
    assert torch.equal(mine.dequantized(), bnb.dequantize_4bit(codes, state)) and mine.dequantized().dtype is dtype
    assert mine.bytes * 8 == 4.5 * whole.numel()


@pytest.mark.parametrize("shape", SHAPES)
def test_values_of_doubly_quantised_scales_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    """Of its own codes of scales: its CPU kernel takes the second nearest level where two are almost as near."""
    codes, state = bnb.quantize_4bit(matrix(shape), blocksize=64, quant_type="nf4", compress_statistics=True)
    second = state.state2
    assert torch.equal(tree_levels(torch.device("cpu")), second.code)
    blocks = shape[1] // 64
    first = torch.arange(shape[0], dtype=torch.int32) * blocks
    means = state.offset.expand(len(second.absmax))
    mine = held(matrix(shape), double=True)
    mine.scales = DoubleScales(state.absmax.view(-1, blocks), first, second.absmax, means)
    assert torch.equal(mine.dequantized(), bnb.dequantize_4bit(codes, state))


def test_codes_of_scales_are_the_nearest_and_all_but_some_ties_those_of_bitsandbytes() -> None:
    scales = quantized(matrix((200, 640)))[1]
    codes, factors, means = doubly(scales)
    shares = ((scales - scales.mean()).flatten() / factors.repeat_interleave(GROUP)[: scales.numel()])[:, None]
    table = tree_levels(torch.device("cpu"))
    far = (shares - table).abs()
    assert torch.allclose(far.gather(1, codes.flatten().long()[:, None]), far.amin(1, keepdim=True), rtol=0, atol=1e-7)
    theirs, state = bnb.quantize_blockwise(scales - scales.mean(), blocksize=GROUP)
    assert torch.equal(factors, state.absmax) and bool((means == scales.mean()).all())
    apart = far.gather(1, theirs.flatten().long()[:, None]) - far.amin(1, keepdim=True)
    assert float((theirs != codes).float().mean()) < 0.01 and float(apart.max()) < 1e-4


@pytest.mark.parametrize("double", [False, True])
def test_a_part_has_the_values_of_the_whole(double: bool) -> None:
    """However rows and columns are cut and put together."""
    wholes = [matrix((48, 256)), 2 * matrix((20, 256))]
    both = torch.cat([held(whole, double=double).dequantized() for whole in wholes])

    def cut(parts: object) -> Tensor:
        joined = torch.cat(list(parts))  # type: ignore[call-overload]
        return joined[torch.arange(67, -1, -2)].chunk(2, dim=1)[1]

    part = Nf4Weight(cut(wholes))
    part.double_scales = double
    part.quantize(wholes, cut)
    assert torch.equal(part.dequantized(), cut([both]))


def test_a_model_without_whole_blocks_is_refused(folders: dict[str, Path]) -> None:
    config = ModelConfig.from_hf_folder(folders["llama"])
    with pytest.raises(
        InputError, match=r"a rank has 96 inputs of model.layers.0.mlp.down_proj.weight \(layout.tp 1\)"
    ):
        check_nf4(config, LayoutSpec())
    with pytest.raises(
        InputError, match=r"a rank has 32 inputs of model.layers.0.self_attn.o_proj.weight \(layout.tp 2\)"
    ):
        check_nf4(config, LayoutSpec(tp=2))
    with pytest.raises(InputError, match="the experts of a gpt_oss model lie in one tensor"):
        check_nf4(ModelConfig.from_hf_folder(folders["gpt_oss"]), LayoutSpec())
