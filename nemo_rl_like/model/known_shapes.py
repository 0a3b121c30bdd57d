"""Shapes of a few public models, so that a layout can be planned without their weights: the values of their config.json files."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_experts import ExpertsConfig
from nemo_rl_like.spec.nearest import nearest


def _llama_3_1(hidden_size: int, intermediate_size: int, layers: int, heads: int) -> ModelConfig:
    """What the sizes of Llama 3.1 share."""
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        max_positions=131_072,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
    )


KNOWN_SHAPES = {
    "llama-3.1-8b": _llama_3_1(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama_3_1(8192, 28_672, 80, 64),
    "qwen3-235b-a22b": ModelConfig(
        family="qwen3_moe",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        layers=94,
        heads=64,
        kv_heads=4,
        head_dim=128,
        max_positions=40_960,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        experts=ExpertsConfig(count=128, per_token=8, width=1536, normalize=True),
    ),
}
"""By name; the scaling of Llama's positions takes no memory and is left out."""


def shape_of(model: str) -> ModelConfig:
    """The shape of a name in `KNOWN_SHAPES`, a Hugging Face folder or a config.json. Raises InputError if it is none of them."""
    if model in KNOWN_SHAPES:
        return KNOWN_SHAPES[model]
    path = Path(model)
    if not path.exists():
        near = nearest(model, KNOWN_SHAPES)
        hint = f"did you mean `{near}`?" if near else f"known names are {', '.join(KNOWN_SHAPES)}"
        raise InputError(f"{model} is neither a Hugging Face folder, nor a config.json, nor a known name; {hint}")
    return ModelConfig.from_hf_folder(path.parent if path.name == "config.json" else path)
