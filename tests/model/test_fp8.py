"""What FP8 layers need, as far as a CPU can tell: Megatron's settings, and sizes that the products take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.factory import build_model, check_fp8_widths
from nemo_rl_like.model.hf_config import ExpertsConfig, ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.known_shapes import KNOWN_SHAPES
from nemo_rl_like.model.megatron_config import transformer_config
from nemo_rl_like.spec.policy import Fp8Spec, LayoutSpec

SMALL = ModelConfig("llama", 512, 64, 96, 2, 4, 2, 16, 128, 10_000.0, 1e-5, False)
MIXTURE = replace(SMALL, family="qwen3_moe", experts=ExpertsConfig(count=4, per_token=2, width=48, normalize=True))
BLOCKS = Fp8Spec(recipe="mxfp8")


def test_the_delayed_recipe_reaches_megatron() -> None:
    fp8 = Fp8Spec(recipe="delayed", amax_history_len=16, amax_compute_algo="most_recent", margin=2, format="e4m3")
    made = transformer_config(KNOWN_SHAPES["llama-3.1-8b"], LayoutSpec(), torch.bfloat16, fp8)
    told = (made.fp8, made.fp8_recipe, made.fp8_amax_history_len, made.fp8_amax_compute_algo, made.fp8_margin)
    assert told == ("e4m3", "delayed", 16, "most_recent", 2)


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_public_models_have_sizes_that_every_recipe_takes(name: str) -> None:
    for recipe in (Fp8Spec(), BLOCKS, Fp8Spec(recipe="delayed")):
        check_fp8_widths(KNOWN_SHAPES[name], LayoutSpec(tp=4, dp=2, ep=2, etp=1), recipe)


@pytest.mark.parametrize(
    ("config", "layout", "fp8", "words"),
    [
        (replace(SMALL, hidden_size=72), LayoutSpec(), Fp8Spec(), "hidden_size is 72, which is not a multiple of 16"),
        (SMALL, LayoutSpec(tp=4), Fp8Spec(), r"intermediate_size / tp is 24, .* 16"),
        (replace(SMALL, head_dim=8), LayoutSpec(tp=4), Fp8Spec(), r"heads \* head_dim / tp is 8, .* 16"),
        (replace(SMALL, intermediate_size=48), LayoutSpec(), BLOCKS, "intermediate_size / tp is 48, .* 32"),
        (MIXTURE, LayoutSpec(), BLOCKS, "experts' width / etp is 48, .* 32"),
        (MIXTURE, LayoutSpec(tp=2, sp=True), Fp8Spec(), "experts' width / etp is 24, .* 16"),
    ],
)
def test_a_size_that_the_products_do_not_take_is_named(
    config: ModelConfig, layout: LayoutSpec, fp8: Fp8Spec, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_fp8_widths(config, layout, fp8)


def test_experts_of_a_rank_may_be_wide_enough_uncut() -> None:
    check_fp8_widths(MIXTURE, LayoutSpec(tp=2, sp=True, etp=1), Fp8Spec())


@pytest.mark.usefixtures("one_rank")
def test_a_cpu_refuses_every_recipe_with_the_reason(folders: dict[str, Path]) -> None:
    config = ModelConfig.from_hf_folder(folders["llama"])
    with SafetensorsReader(folders["llama"]) as weights:
        for recipe in ("tensorwise", "blockwise", "mxfp8", "delayed"):
            with pytest.raises(InputError, match=rf"policy.fp8 \(recipe {recipe}\) needs a CUDA GPU"):
                build_model(
                    config,
                    LayoutSpec(),
                    torch.bfloat16,
                    weights=weights,
                    fp8=Fp8Spec(recipe=recipe),  # type: ignore[arg-type]
                )
