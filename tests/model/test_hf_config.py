"""Laws of reading and writing Hugging Face configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import (
    AutoConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.families import FAMILIES
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.lora import check_targets
from nemo_rl_like.spec.model import LinearRope, ModelInitSpec
from nemo_rl_like.spec.policy import LayoutSpec, LoraSpec
from tests.model import tiny

CONFIGS = (
    LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_theta=5e5, eos_token_id=[2, 3]),
    Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True),
    Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_theta=1e6),
    MixtralConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=6),
    Gemma2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3),
    Gemma3TextConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
    MistralConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
    Qwen3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=4,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    NemotronConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
    Glm4MoeConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    ),
    DeepseekV2Config(
        hidden_size=64, num_attention_heads=4, num_experts_per_tok=2, q_lora_rank=None, n_group=1, topk_group=1
    ),
    DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_interleave=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 4096,
            "truncate": True,
        },
    ),
    GptOssConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        num_local_experts=6,
        swiglu_limit=5.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    Qwen2MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, qkv_bias=False, norm_topk_prob=True),
    Phi3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, partial_rotary_factor=0.75),
    Qwen3MoeConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=6, num_experts_per_tok=2
    ),
)
ATTENTION_KEYS = (
    "sliding_window",
    "layer_types",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
)
ROUTER_KEYS = (
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "n_routed_experts",
    "n_group",
    "topk_group",
    "n_shared_experts",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "shared_expert_intermediate_size",
    "swiglu_alpha",
    "swiglu_limit",
)
LATENT_KEYS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "head_dim",
    "rope_interleave",
    "topk_method",
)
GLM = next(config for config in CONFIGS if config.model_type == "glm4_moe")
GPT_OSS = next(config for config in CONFIGS if config.model_type == "gpt_oss")
DEEPSEEK_V2, DEEPSEEK_V3 = (next(c for c in CONFIGS if c.model_type == f"deepseek_v{i}") for i in (2, 3))
BASE = ModelConfig.from_hf_dict(CONFIGS[0].to_dict()).to_hf_dict()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_what_is_written_is_read_back_here_and_by_transformers(config: PreTrainedConfig, tmp_path: Path) -> None:
    shape = ModelConfig.from_hf_dict(config.to_dict())
    (tmp_path / "config.json").write_text(json.dumps(shape.to_hf_dict()))
    assert ModelConfig.from_hf_folder(tmp_path) == shape
    theirs = AutoConfig.from_pretrained(str(tmp_path))
    assert theirs.model_type == config.model_type
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert rope["rope_theta"] == shape.rope_theta and rope.get("partial_rotary_factor", 1.0) == shape.rotary_share
    assert theirs.rope_parameters == config.rope_parameters
    for name in ("hidden_size", "num_key_value_heads", "tie_word_embeddings", "eos_token_id"):
        assert getattr(theirs, name) == getattr(config, name), name
    latent = LATENT_KEYS if shape.latent is not None else ()
    for name in (*ATTENTION_KEYS, *ROUTER_KEYS, *latent, "rms_norm_eps", "norm_eps"):
        assert getattr(theirs, name, None) == getattr(config, name, None), name
    for name in ("attention_bias", "use_qk_norm", "qkv_bias"):
        assert getattr(theirs, name, False) == getattr(config, name, False), name


def test_the_older_keys_of_gemma_3_are_read_too() -> None:
    """config.json of transformers 4: the pattern as a number, the base of windows by itself, a tied head not told."""
    raw = {
        "model_type": "gemma3_text", "vocab_size": 9, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
        "num_attention_heads": 4, "sliding_window": 512, "sliding_window_pattern": 3, "rope_theta": 1e6,
        "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    shape = ModelConfig.from_hf_dict(raw)
    assert shape.attention.windowed == (True, True, False, True, True) and shape.attention.window == 512
    assert (shape.rope_theta, shape.window_rope_theta, shape.rope_scaling) == (1e6, 2e4, LinearRope(factor=8.0))
    assert shape.tie_embeddings and shape.head_dim == 256


def test_the_older_rope_theta_is_read_too() -> None:
    raw = {**BASE, "rope_theta": 123.0}
    del raw["rope_parameters"]
    assert ModelConfig.from_hf_dict(raw).rope_theta == 123.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"model_type": "bloom"},
            "model_type is 'bloom'; supported are deepseek_v2, deepseek_v3, gemma2, gemma3_text, glm4_moe, gpt_oss, llama, mistral, mixtral, nemotron, phi3, qwen2, qwen2_moe, qwen3",
        ),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "id2label"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope_parameters.rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}, "rope_parameters": None}, "rope_scaling.rope_type"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window is 128"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": "far"}, "sliding_window is 'far'"),
        (
            {"model_type": "qwen2", "architectures": None, "layer_types": ["sliding_attention"] * 32},
            "layer_types has 'sliding_attention', but there is no sliding window",
        ),
        ({"model_type": "qwen2", "architectures": None, "layer_types": ["full_attention"]}, "has 1 entries for 32"),
        ({"model_type": "qwen3", "architectures": None, "layer_types": ["chunked"]}, "layer_types is ['chunked']"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is set"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": 1.0}}},
            "rope_parameters.sliding_attention is given",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1"),
        ({"model_type": "phi3", "architectures": None, "resid_pdrop": 0.1}, "resid_pdrop is not 0"),
        ({"model_type": "phi3", "architectures": None, "partial_rotary_factor": 1.5}, "expected in (0, 1]"),
        ({"model_type": "phi3", "architectures": None, "partial_rotary_factor": 0.2}, "positions turn 0.2"),
        (
            {"model_type": "phi3", "architectures": None, "rope_parameters": {"rope_type": "longrope"}},
            "rope_parameters.short_factor Field required",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf_dict({**BASE, **change}, source="folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is not 1"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is not empty"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, more than the 6 experts"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok is 1"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is not 0"),
        ({"num_experts": 0}, "num_experts is 0"),
    ],
)
def test_experts_that_are_not_supported_are_refused_by_name(change: dict[str, object], named: str) -> None:
    raw = ModelConfig.from_hf_dict(CONFIGS[-1].to_dict()).to_hf_dict()
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf_dict({**raw, **change}, source="folder/config.json")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is not 1"),
        ({"n_group": 3}, "n_group is 3, which does not divide the 16 experts into groups of 2 or more"),
        ({"n_group": 16}, "n_group is 16"),
        ({"topk_group": 1}, "topk_group is 1 of 4 groups, which have too few of the 16 experts for 8 a token"),
        ({"topk_group": 5}, "topk_group is 5 of 4 groups"),
        ({"first_k_dense_replace": 46}, "first_k_dense_replace is 46; expected less than the 46 layers"),
    ],
)
def test_routers_that_are_not_supported_are_refused_by_name(change: dict[str, object], named: str) -> None:
    raw = ModelConfig.from_hf_dict(GLM.to_dict()).to_hf_dict()
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf_dict({**raw, **change}, source="folder/config.json")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob is true, which transformers ignores"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported are greedy and group_limited"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7"),
        (DEEPSEEK_V3, {"v_head_dim": 200}, "v_head_dim is 200, more than the 192 of queries and keys"),
        (
            DEEPSEEK_V3,
            {"num_key_value_heads": 2},
            "num_key_value_heads is 2; latent attention has keys and values for all",
        ),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias is true"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank is None"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set; only unquantised"),
        (
            GPT_OSS,
            {"quantization_config": {"quant_method": "mxfp4"}},
            "dequantize=True` in its quantization config (Mxfp4",
        ),
        (GPT_OSS, {"attention_bias": False}, "attention_bias is false; every matrix of a gpt_oss model has a bias"),
        (GPT_OSS, {"swiglu_limit": None}, "swiglu_limit is null"),
        (GPT_OSS, {"rope_parameters": None, "rope_scaling": None}, "rope_type is absent"),
    ],
)
def test_what_a_family_cannot_be_is_refused_by_name(
    config: PreTrainedConfig, change: dict[str, object], named: str
) -> None:
    raw = ModelConfig.from_hf_dict(config.to_dict()).to_hf_dict()
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf_dict({**raw, **change}, source="folder/config.json")
    assert named in str(caught.value)


def test_what_latent_attention_and_sinks_lack_is_refused_by_name() -> None:
    shape = ModelConfig.from_hf_dict(DEEPSEEK_V3.to_dict())
    with pytest.raises(InputError) as caught:
        check_targets(shape, LoraSpec())
    assert "q_proj, k_proj, v_proj, which are not in a deepseek_v3 model and gate_proj" in str(caught.value)
    assert "use targets: [q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj]" in str(caught.value)
    with pytest.raises(InputError, match=r"gate_proj, up_proj, which are parts of one tensor in .* gate_up_proj\]"):
        check_targets(ModelConfig.from_hf_dict(GPT_OSS.to_dict()), LoraSpec())
    with pytest.raises(InputError, match=r"policy.lora.dora is true, which PEFT has not for experts"):
        check_targets(ModelConfig.from_hf_dict(GPT_OSS.to_dict()), LoraSpec(dora=True, targets=("gate_up_proj",)))


@pytest.mark.parametrize(
    ("change", "tp", "named"),
    [
        ({"intermediate_size": 1001}, 2, r"intermediate_size \(1001\)"),
        ({"moe_intermediate_size": 9, "n_shared_experts": 1}, 2, r"shared expert's width \(9\)"),
    ],
)
def test_tensor_parallelism_must_divide_dense_layers_and_the_shared_expert(
    change: dict[str, object], tp: int, named: str
) -> None:
    shape = ModelConfig.from_hf_dict({**GLM.to_dict(), **change})
    with pytest.raises(InputError, match=named):
        shape.check_layout(LayoutSpec(tp=tp, sp=True, etp=1))


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (LayoutSpec(dp=4, ep=4), r"layout.ep is 4.*6 experts.*\[1, 2, 3, 6\]"),
        (LayoutSpec(tp=2), r"layout.tp is 2 with layout.sp false.*sp: true"),
        (LayoutSpec(tp=2, sp=True, dp=5, etp=5), r"layout.etp is 5.*width of an expert \(768\)"),
    ],
)
def test_a_layout_that_does_not_divide_the_experts_is_refused(layout: LayoutSpec, named: str) -> None:
    with pytest.raises(InputError, match=named):
        ModelConfig.from_hf_dict(CONFIGS[-1].to_dict()).check_layout(layout)


def test_biases_of_experts_are_not_cut_by_tensor_parallelism() -> None:
    shape = ModelConfig.from_hf_dict(GPT_OSS.to_dict())
    shape.check_layout(LayoutSpec(tp=2, sp=True, etp=1))
    with pytest.raises(InputError, match=r"layout.etp is 2 \(default: tp\).*biases.*set `etp: 1`"):
        shape.check_layout(LayoutSpec(tp=2, sp=True))


def test_a_token_passes_some_of_the_experts_and_the_router() -> None:
    shape = ModelConfig.from_hf_dict(CONFIGS[-1].to_dict())
    attention = 64 * (4 * 32 + 2 * 2 * 32) + 4 * 32 * 64
    assert shape.active_parameters == attention + 6 * 64 + 2 * 3 * 768 * 64


def test_a_missing_or_broken_config_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        ModelConfig.from_hf_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_hf_folder(tmp_path)


def test_a_layout_that_does_not_divide_the_model_says_which_do() -> None:
    shape = ModelConfig.from_init(ModelInitSpec(heads=6, kv_heads=6, layers=5), vocab_size=30)
    with pytest.raises(InputError, match=r"layout.tp is 4.*heads \(6\).*\[1, 2\]"):
        shape.check_layout(LayoutSpec(tp=4))
    with pytest.raises(InputError, match=r"layout.pp is 6.*5 layers.*\[1, 2, 3, 5\]"):
        shape.check_layout(LayoutSpec(pp=6))
    with pytest.raises(InputError, match=r"layout.cp is 2.*3 heads.*use cp in \[1, 3\]"):
        shape.check_layout(LayoutSpec(tp=2, cp=2))
    shape.check_layout(LayoutSpec(tp=2, pp=3, cp=3))
    with pytest.raises(
        InputError, match=r"layout.vpp is 2.*2 \* 2 stages.*5 layers; change pp, which does not divide 5"
    ):
        shape.check_layout(LayoutSpec(pp=2, vpp=2))
    with pytest.raises(InputError, match=r"layout.vpp is 3.*5 layers; use vpp in \[1\]"):
        shape.check_layout(LayoutSpec(pp=5, vpp=3))
    assert [list(shape.layers_of_stage(i, 3)) for i in range(3)] == [[0, 1], [2, 3], [4]]


def test_the_vocabulary_is_padded_to_the_ranks() -> None:
    shape = ModelConfig.from_hf_dict({**BASE, "vocab_size": 131})
    assert [shape.padded_vocab(tp) for tp in (1, 2, 3)] == [131, 132, 132]
    assert {*FAMILIES, "llama_tied"} == set(tiny.FAMILIES)


def test_a_classifier_of_one_label_has_a_score_head_and_no_logits() -> None:
    raw = {**BASE, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
    shape = ModelConfig.from_hf_dict(raw)
    assert shape.score_head and ModelConfig.from_hf_dict(shape.to_hf_dict()) == shape
    with pytest.raises(InputError, match=r"^teacher: .*one score a token and no logits"):
        shape.require_logits("teacher")
    ModelConfig.from_hf_dict(BASE).require_logits("model")
