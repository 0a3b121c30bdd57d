"""Shapes of a few public models, so that a layout can be planned without their weights: the values of the config.json files that their
publishers have on Hugging Face's hub (meta-llama, Qwen, deepseek-ai, zai-org, openai, google)."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_attention import AttentionConfig
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_experts import ClampedSwiGlu, ExpertsConfig
from nemo_rl_like.model.hf_latent import LatentConfig
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


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    """What the sizes of GPT-OSS share."""
    return ModelConfig(
        family="gpt_oss",
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        layers=layers,
        heads=64,
        kv_heads=8,
        head_dim=64,
        max_positions=131_072,
        rope_theta=150_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
        attention=AttentionConfig(window=128, windowed=tuple(i % 2 == 0 for i in range(layers))),
        experts=ExpertsConfig(experts, per_token=4, width=2880, normalize=True, swiglu=ClampedSwiGlu(1.702, 7.0)),
    )


def _glm_4_5(hidden_size: int, intermediate_size: int, layers: int, norms: bool, experts: ExpertsConfig) -> ModelConfig:
    """What the sizes of GLM-4.5 share. `norms`: of queries and keys."""
    return ModelConfig(
        family="glm4_moe",
        vocab_size=151_552,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layers=layers,
        heads=96,
        kv_heads=8,
        head_dim=128,
        max_positions=131_072,
        rope_theta=1_000_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
        rotary_share=0.5,
        experts=experts,
        own_qkv_bias=True,
        own_qk_norm=norms,
    )


def _gemma_2(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, kv_heads: int, head_dim: int, scalar: int
) -> ModelConfig:
    """What the sizes of Gemma 2 share. `scalar`: `query_pre_attn_scalar`."""
    windowed = tuple(i % 2 == 0 for i in range(layers))
    return ModelConfig(
        family="gemma2",
        vocab_size=256_000,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=8192,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tie_embeddings=True,
        attention=AttentionConfig(4096, windowed, score_scalar=scalar, score_cap=50.0),
        logit_cap=30.0,
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
    "qwen1.5-moe-a2.7b": ModelConfig(
        family="qwen2_moe",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=5632,
        layers=24,
        heads=16,
        kv_heads=16,
        head_dim=128,
        max_positions=8192,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        experts=ExpertsConfig(count=60, per_token=4, width=1408, normalize=False, shared_width=5632),
    ),
    "qwen2-57b-a14b": ModelConfig(
        family="qwen2_moe",
        vocab_size=151_936,
        hidden_size=3584,
        intermediate_size=18_944,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        max_positions=131_072,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        experts=ExpertsConfig(count=64, per_token=8, width=2560, normalize=False, shared_width=20_480),
    ),
    "gemma-2-9b": _gemma_2(3584, 14_336, 42, heads=16, kv_heads=8, head_dim=256, scalar=256),
    "gemma-2-27b": _gemma_2(4608, 36_864, 46, heads=32, kv_heads=16, head_dim=128, scalar=144),
    "gemma-3-1b": ModelConfig(
        family="gemma3_text",
        vocab_size=262_144,
        hidden_size=1152,
        intermediate_size=6912,
        layers=26,
        heads=4,
        kv_heads=1,
        head_dim=256,
        max_positions=32_768,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=True,
        window_rope_theta=10_000.0,
        attention=AttentionConfig(512, tuple((i + 1) % 6 != 0 for i in range(26)), score_scalar=256),
    ),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    "glm-4.5-air": _glm_4_5(
        4096,
        10_944,
        layers=46,
        norms=False,
        experts=ExpertsConfig(128, per_token=8, width=1408, normalize=True, shared_width=1408, first_dense=1),
    ),
    "glm-4.5": _glm_4_5(
        5120,
        12_288,
        layers=92,
        norms=True,
        experts=ExpertsConfig(
            160, per_token=8, width=1536, normalize=True, scale=2.5, shared_width=1536, first_dense=3
        ),
    ),
    "deepseek-v3": ModelConfig(
        family="deepseek_v3",
        vocab_size=129_280,
        hidden_size=7168,
        intermediate_size=18_432,
        layers=61,
        heads=128,
        kv_heads=128,
        head_dim=192,
        max_positions=163_840,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        experts=ExpertsConfig(
            256,
            per_token=8,
            width=2048,
            normalize=True,
            scale=2.5,
            groups=8,
            groups_per_token=4,
            shared_width=2048,
            first_dense=3,
        ),
        latent=LatentConfig(
            query_rank=1536, key_value_rank=512, plain_width=128, rotary_width=64, value_width=128, interleaved=True
        ),
    ),
}
"""By name; the scaling of positions takes no memory and is left out, and so are layers that predict later tokens."""


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
