"""Stretched positions: frequencies and logits are those of transformers, far beyond the trained context, and survive a config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.attention_layouts import CausalLayout
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.heads import full_logits, output_head
from nemo_rl_like.model.hf_config import ModelConfig, stretched
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.hf_rope import rope_to_hf_dict
from nemo_rl_like.model.rope import rotary_amplitude, rotary_frequencies
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.spec.model import LinearRope, Llama3Rope, ModelSpec, RopeScalingSpec, YarnRope
from nemo_rl_like.spec.policy import LayoutSpec
from nemo_rl_like.stages.start_model import start_model

TRAINED = 32
SCALINGS: list[RopeScalingSpec] = [
    LinearRope(factor=4.0),
    Llama3Rope(factor=8.0, original_positions=TRAINED),
    YarnRope(factor=4.0, original_positions=TRAINED),
    YarnRope(factor=4.0, original_positions=TRAINED, beta_fast=4.0, beta_slow=0.5, attention_factor=1.3, truncate=False),
]  # fmt: skip
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": TRAINED,
}

factors, originals = st.floats(1.0, 64.0), st.integers(16, 8192)
scalings = st.one_of(
    st.builds(LinearRope, factor=factors),
    st.builds(Llama3Rope, factor=factors, original_positions=originals, low_freq_factor=st.floats(0.5, 2.0)),
    st.builds(YarnRope, factor=factors, original_positions=originals, truncate=st.booleans(), beta_fast=st.floats(8, 64)),
)  # fmt: skip


def hf_config(scaling: RopeScalingSpec | None, theta: float = 10000.0) -> LlamaConfig:
    shape = {**SHAPE, "max_position_embeddings": 1 << 20}
    return LlamaConfig(**shape, rope_parameters=rope_to_hf_dict(theta, scaling)["rope_parameters"])


@settings(deadline=None)
@given(scaling=scalings, theta=st.floats(100.0, 1e6))
def test_frequencies_and_amplitude_are_those_of_transformers(scaling: RopeScalingSpec, theta: float) -> None:
    want, amplitude = ROPE_INIT_FUNCTIONS[scaling.kind](hf_config(scaling, theta), torch.device("cpu"))
    torch.testing.assert_close(rotary_frequencies(16, theta, scaling), want, rtol=2e-6, atol=0)
    assert rotary_amplitude(scaling) == pytest.approx(amplitude, rel=1e-6)


def logits_of(config: ModelConfig, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with SafetensorsReader(folder) as reader, torch.no_grad():
        model = build_model(config, LayoutSpec(), torch.float32, weights=reader)
        hidden = model.first.run_stage(ids[None], torch.arange(len(ids))[None], CausalLayout())
        return full_logits(hidden[:, 0], output_head(model))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.kind)
def test_logits_are_those_of_transformers_at_four_times_the_trained_length(
    tmp_path: Path, scaling: RopeScalingSpec
) -> None:
    torch.manual_seed(0)
    rope = rope_to_hf_dict(10000.0, scaling)["rope_parameters"]
    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.2, rope_parameters=rope))
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, SHAPE["vocab_size"], (4 * TRAINED,))
    with torch.no_grad():
        want = theirs.double()(ids[None]).logits[0]
    config = ModelConfig.from_hf_folder(tmp_path)
    assert config.rope_scaling == scaling
    assert float((logits_of(config, tmp_path, ids) - want).abs().max()) < 1e-4
    plain = replace(config, rope_scaling=None)
    assert float((logits_of(plain, tmp_path, ids) - want).abs().max()) > 1e-2


@pytest.mark.parametrize("scaling", [None, *SCALINGS])
def test_a_config_says_the_same_to_us_and_to_transformers(tmp_path: Path, scaling: RopeScalingSpec | None) -> None:
    plain = ModelConfig.from_hf_dict(hf_config(None).to_dict())
    made = stretched(plain, scaling, 128)
    (tmp_path / "config.json").write_text(json.dumps(made.to_hf_dict()))
    assert ModelConfig.from_hf_folder(tmp_path) == made
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters["rope_type"] == ("default" if scaling is None else scaling.kind)
    assert read.max_position_embeddings == (128 if scaling is not None else 1 << 20)


def test_the_words_of_other_versions_and_models_are_read() -> None:
    old = {**hf_config(None).to_dict(), "rope_theta": 500.0, "rope_parameters": None}
    config = ModelConfig.from_hf_dict({**old, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (config.rope_theta, config.rope_scaling) == (500.0, LinearRope(factor=2.0))
    scales = {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 64,
    }
    config = ModelConfig.from_hf_dict({**old, "rope_scaling": scales})
    _, amplitude = ROPE_INIT_FUNCTIONS["yarn"](
        LlamaConfig(**SHAPE, rope_parameters={**scales, "rope_theta": 500.0}), torch.device("cpu")
    )
    assert rotary_amplitude(config.rope_scaling) == pytest.approx(amplitude)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling.rope_type is 'dynamic'; supported are default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, "rope_scaling.factor is None; expected a number"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor Input should be greater than or equal to 1"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}, "must be below `high_freq_factor`"),
    ],
)  # fmt: skip
def test_a_stretching_that_is_not_known_is_refused(block: dict[str, Any], words: str) -> None:
    raw = {**hf_config(None).to_dict(), "rope_parameters": None, "rope_scaling": block}
    with pytest.raises(InputError) as error:
        ModelConfig.from_hf_dict(raw)
    assert words in str(error.value)


def test_a_spec_stretches_a_model(tmp_path: Path) -> None:
    """The stage's own folder says so to every engine; the weights are those of the source."""
    config = LlamaConfig(**SHAPE)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    scaling = YarnRope(factor=4.0, original_positions=TRAINED)
    model = ModelSpec(path=str(tmp_path / "source"), rope_scaling=scaling)
    spec = ExperimentSpec(output="x", model=model, stages=(ExportStageSpec(),))
    start = start_model(spec, tmp_path / "stage", None)
    assert (start.config.rope_scaling, start.config.max_positions) == (scaling, 4 * TRAINED)
    read = LlamaForCausalLM.from_pretrained(start.folder)
    assert read.config.rope_parameters["factor"] == 4.0 and read.config.max_position_embeddings == 4 * TRAINED
