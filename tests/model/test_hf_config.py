"""Laws of reading and writing Hugging Face configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.families import FAMILIES
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.spec.model import ModelInitSpec
from nemo_rl_like.spec.policy import LayoutSpec

CONFIGS = (
    LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_theta=5e5, eos_token_id=[2, 3]),
    Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True),
    Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_theta=1e6),
)
BASE = ModelConfig.from_hf_dict(CONFIGS[0].to_dict()).to_hf_dict()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_what_is_written_is_read_back_here_and_by_transformers(config: LlamaConfig, tmp_path: Path) -> None:
    shape = ModelConfig.from_hf_dict(config.to_dict())
    (tmp_path / "config.json").write_text(json.dumps(shape.to_hf_dict()))
    assert ModelConfig.from_hf_folder(tmp_path) == shape
    theirs = AutoConfig.from_pretrained(str(tmp_path))
    assert theirs.model_type == config.model_type
    assert theirs.rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"] == shape.rope_theta
    for name in ("hidden_size", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps", "eos_token_id"):
        assert getattr(theirs, name) == getattr(config, name), name


def test_the_older_rope_theta_is_read_too() -> None:
    raw = {**BASE, "rope_theta": 123.0}
    del raw["rope_parameters"]
    assert ModelConfig.from_hf_dict(raw).rope_theta == 123.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral'; supported are llama, mistral, qwen2, qwen3"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "id2label"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope_parameters.rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}, "rope_parameters": None}, "rope_scaling.rope_type"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window is 128"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 4096}, "sliding_window is 4096"),
        ({"model_type": "mistral", "architectures": None}, "sliding_window is 4096"),
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
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf_dict({**BASE, **change}, source="folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")
    assert named in str(caught.value)


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
    shape.check_layout(LayoutSpec(tp=2, pp=3))
    assert [list(shape.layers_of_stage(i, 3)) for i in range(3)] == [[0, 1], [2, 3], [4]]


def test_the_vocabulary_is_padded_to_the_ranks() -> None:
    shape = ModelConfig.from_hf_dict({**BASE, "vocab_size": 131})
    assert [shape.padded_vocab(tp) for tp in (1, 2, 3)] == [131, 132, 132]
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3"}


def test_a_classifier_of_one_label_has_a_score_head_and_no_logits() -> None:
    raw = {**BASE, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
    shape = ModelConfig.from_hf_dict(raw)
    assert shape.score_head and ModelConfig.from_hf_dict(shape.to_hf_dict()) == shape
    with pytest.raises(InputError, match=r"^teacher: .*one score a token and no logits"):
        shape.require_logits("teacher")
    ModelConfig.from_hf_dict(BASE).require_logits("model")
