"""LongRoPE: frequencies and logits are transformers' beyond the trained context; one choice of factors for rows of any length."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoConfig, Phi3Config, Phi3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.attention_layouts import CausalLayout
from nemo_rl_like.model.check import _hugging_face
from nemo_rl_like.model.check_rank import round_trip_equal
from nemo_rl_like.model.decode import Decoder
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.heads import full_logits, output_head
from nemo_rl_like.model.hf_config import ModelConfig, stretched
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.rope import rotary_amplitude, rotary_frequencies
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.spec.model import LongRope, YarnRope
from nemo_rl_like.spec.policy import LayoutSpec

TRAINED, LONGEST = 16, 128
PAIRS = 6
"""Of heads of 16 channels, of which positions turn three quarters, as in Phi-4-mini."""
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.0, 1.5, 2.5, 5.0, 9.0, 14.0]
PHI4_MINI = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
"""As its config.json has them."""


def phi4_mini(**more: object) -> Phi3Config:
    return Phi3Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=TRAINED,
        partial_rotary_factor=0.75,
        rope_scaling=dict(PHI4_MINI),
        sliding_window=4 * LONGEST,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=None,
        eos_token_id=1,
        **more,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("phi4_mini")
    Phi3ForCausalLM(phi4_mini()).save_pretrained(folder)
    return folder


@pytest.fixture
def model(folder: Path, one_rank: None) -> MegatronModel:
    with SafetensorsReader(folder) as reader:
        return build_model(ModelConfig.from_hf_folder(folder), LayoutSpec(), torch.float32, weights=reader)


def ours(model: MegatronModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = model.first.run_stage(ids[None], torch.arange(len(ids))[None], CausalLayout())
        return full_logits(hidden[:, 0], output_head(model))


def theirs(folder: Path, ids: Tensor) -> Tensor:
    model = Phi3ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        return model(ids[None]).logits[0]


def drawn(count: int) -> Tensor:
    return torch.randint(61, (count,), generator=torch.Generator().manual_seed(1))


numbers = st.lists(st.floats(0.5, 64.0), min_size=PAIRS, max_size=PAIRS)


@given(
    short=numbers,
    long=numbers,
    original=st.integers(2, 8192),
    positions=st.integers(2, 1 << 17),
    theta=st.floats(100.0, 1e6),
    attention=st.none() | st.floats(0.5, 2.0),
)
def test_frequencies_and_amplitude_are_those_of_transformers_at_the_models_longest_row(
    short: list[float], long: list[float], original: int, positions: int, theta: float, attention: float | None
) -> None:
    scaling = LongRope(original_positions=original, short_factor=short, long_factor=long, attention_factor=attention)
    rope = {"rope_type": "longrope", "rope_theta": theta, "short_factor": short, "long_factor": long}
    rope |= {"original_max_position_embeddings": original, "attention_factor": attention, "partial_rotary_factor": 0.75}
    config = phi4_mini()
    config.max_position_embeddings, config.original_max_position_embeddings = positions, original
    config.rope_parameters, config.head_dim = rope, 16
    want, amplitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=positions)
    found = rotary_frequencies(2 * PAIRS, theta, scaling, positions)
    torch.testing.assert_close(found, want, rtol=2e-6, atol=0)
    assert rotary_amplitude(scaling, positions) == pytest.approx(amplitude, rel=1e-6)


@pytest.mark.parametrize("length", [TRAINED + 1, LONGEST])
def test_logits_are_those_of_transformers_beyond_the_trained_context(
    folder: Path, model: MegatronModel, length: int
) -> None:
    ids = drawn(length)
    want = theirs(folder, ids)
    assert (ours(model, ids) - want).abs().max() < 1e-4
    short = replace(model.shape, max_positions=TRAINED)
    with SafetensorsReader(folder) as reader:
        assert (ours(build_model(short, LayoutSpec(), torch.float32, weights=reader), ids) - want).abs().max() > 1e-2


def test_what_a_token_sees_does_not_depend_on_what_follows_where_transformers_changes_its_mind(
    folder: Path, model: MegatronModel
) -> None:
    ids = drawn(TRAINED + 8)
    assert (ours(model, ids)[:TRAINED] - ours(model, ids[:TRAINED])).abs().max() < 1e-5
    assert (theirs(folder, ids)[:TRAINED] - theirs(folder, ids[:TRAINED])).abs().max() > 1e-2


def test_a_context_within_the_trained_one_takes_the_short_factors_as_transformers_does(
    folder: Path, one_rank: None
) -> None:
    config = replace(ModelConfig.from_hf_folder(folder), max_positions=TRAINED)
    with SafetensorsReader(folder) as reader:
        model = build_model(config, LayoutSpec(), torch.float32, weights=reader)
    reference = phi4_mini()
    reference.max_position_embeddings = TRAINED
    hugging_face = Phi3ForCausalLM.from_pretrained(folder, config=reference, attn_implementation="eager").double()
    ids = drawn(TRAINED)
    with torch.no_grad():
        assert (ours(model, ids) - hugging_face(ids[None]).logits[0]).abs().max() < 1e-4


def test_decoding_past_the_trained_context_goes_on_as_the_whole_row(model: MegatronModel) -> None:
    ids, decoder = drawn(TRAINED + 6), Decoder(model)
    state, logits = decoder.prefill([ids[: TRAINED - 3].tolist()], [1])
    found = [logits]
    for token in ids[TRAINED - 3 :]:
        found.append(decoder.step(state, token[None]))
    assert (torch.cat([x for x in found if x is not None]) - ours(model, ids)[TRAINED - 4 :]).abs().max() < 1e-5


def test_the_check_compares_short_rows_at_the_models_one_choice(folder: Path, model: MegatronModel) -> None:
    ids = drawn(TRAINED - 2)
    (want,) = _hugging_face(folder, None, [ids.tolist()], torch.float64)
    assert (ours(model, ids) - want).abs().max() < 1e-4


def test_weights_go_back_bit_for_bit(folder: Path, model: MegatronModel) -> None:
    with SafetensorsReader(folder) as reader:
        assert round_trip_equal(WeightMap(model.shape), model, reader)


def test_a_config_says_the_same_to_us_and_to_transformers(folder: Path, tmp_path: Path) -> None:
    made = ModelConfig.from_hf_folder(folder)
    assert made.rope_scaling == LongRope(original_positions=TRAINED, short_factor=SHORT, long_factor=LONG)
    assert (made.rotary_share, made.max_positions) == (0.75, LONGEST)
    (tmp_path / "config.json").write_text(json.dumps(made.to_hf_dict()))
    assert ModelConfig.from_hf_folder(tmp_path) == made
    before, after = (AutoConfig.from_pretrained(x) for x in (folder, tmp_path))
    kinds = [
        ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=LONGEST) for config in (before, after)
    ]
    assert torch.equal(kinds[0][0], kinds[1][0]) and kinds[0][1] == kinds[1][1]
    # What transformers 4 checks: three keys, and the trained context beside them.
    written = made.to_hf_dict()
    assert written["rope_scaling"] == PHI4_MINI and written["original_max_position_embeddings"] == TRAINED


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_older_files_of_phi_3_are_read(name: str) -> None:
    raw = {**phi4_mini().to_dict(), "rope_parameters": None, "rope_scaling": {**PHI4_MINI, "type": name}}
    scaling = ModelConfig.from_hf_dict(raw).rope_scaling
    assert isinstance(scaling, LongRope) and scaling.original_positions == TRAINED


def test_a_factor_in_a_file_sets_the_attention_factor_as_in_transformers() -> None:
    rope = {**PHI4_MINI, "rope_type": "longrope", "factor": 3.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    config = phi4_mini()
    config.rope_parameters = {**rope, "original_max_position_embeddings": TRAINED}
    config.head_dim = 16
    _, amplitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=LONGEST)
    read = ModelConfig.from_hf_dict(config.to_dict())
    assert rotary_amplitude(read.rope_scaling, read.max_positions) == pytest.approx(amplitude)
    assert amplitude != pytest.approx(
        rotary_amplitude(ModelConfig.from_hf_dict(phi4_mini().to_dict()).rope_scaling, LONGEST)
    )


def test_what_cannot_be_is_refused(folder: Path) -> None:
    raw = phi4_mini().to_dict()
    raw |= {"rope_parameters": None, "rope_scaling": {**PHI4_MINI, "short_factor": SHORT[1:], "long_factor": LONG[1:]}}
    with pytest.raises(
        InputError, match=r"rope_scaling.long_factor has 5 numbers; positions turn 12 channels of a head"
    ):
        ModelConfig.from_hf_dict(raw)
    with pytest.raises(ValidationError, match="`short_factor` has 1 numbers and `long_factor` 2"):
        LongRope(original_positions=TRAINED, short_factor=(1.0,), long_factor=(1.0, 2.0))
    config = ModelConfig.from_hf_folder(folder)
    with pytest.raises(InputError, match=r"model.rope_scaling.long_factor has 1 numbers"):
        stretched(config, LongRope(original_positions=TRAINED, short_factor=(1.0,), long_factor=(2.0,)), None)
    with pytest.raises(InputError, match=r"stretches the positions of a phi3 model by longrope"):
        stretched(config, YarnRope(factor=2.0, original_positions=TRAINED), None)
