"""Which projections of a family cannot have an adapter (what adapters compute: tests/policy/test_lora_laws.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.lora_map import check_targets
from nemo_rl_like.model.virtual_tokens import check_prompt
from nemo_rl_like.spec.policy import LoraSpec, PromptTuningSpec


@pytest.mark.parametrize(
    ("family", "refused", "named", "allowed"),
    [
        ("phi3", ("q_proj", "gate_proj"), "parts of one matrix in the files of a phi3 model", ("o_proj", "down_proj")),
        (
            "nemotron",
            ("gate_proj",),
            "not in a nemotron model",
            ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
        ),
    ],
)
def test_a_projection_that_has_no_matrix_of_its_own_has_no_adapter(
    folders: dict[str, Path], family: str, refused: tuple[str, ...], named: str, allowed: tuple[str, ...]
) -> None:
    config = ModelConfig.from_hf_folder(folders[family])
    check_targets(config, LoraSpec.model_validate({"targets": allowed}))
    with pytest.raises(InputError) as caught:
        check_targets(config, LoraSpec.model_validate({"targets": (*refused, "o_proj")}))
    assert f"policy.lora.targets has {', '.join(refused)}, which are {named}" in str(caught.value)
    assert f"use targets: [{', '.join(allowed)}]" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "tokens", "named"),
    [("gemma2", 4, "a gemma2 model multiplies its embeddings"), ("llama", 128, "policy.adapter.tokens is 128")],
)
def test_a_model_that_cannot_have_virtual_tokens_is_refused(
    folders: dict[str, Path], family: str, tokens: int, named: str
) -> None:
    with pytest.raises(InputError, match=named):
        check_prompt(ModelConfig.from_hf_folder(folders[family]), PromptTuningSpec(tokens=tokens))


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        ({"targets": ("q_proj", "up_proj")}, "policy.lora.targets has up_proj without gate_proj"),
        ({"dora": True}, "policy.lora.dora is true"),
        ({"dropout": 0.1}, "policy.lora.dropout is 0.1"),
    ],
)
def test_what_peft_has_not_for_experts_is_refused(folders: dict[str, Path], lora: dict[str, Any], named: str) -> None:
    for family in ("mixtral", "qwen3_moe"):
        config = ModelConfig.from_hf_folder(folders[family])
        check_targets(config, LoraSpec())
        check_targets(
            config,
            LoraSpec.model_validate({"targets": ("o_proj",)} | {k: v for k, v in lora.items() if k != "targets"}),
        )
        with pytest.raises(InputError, match=named):
            check_targets(config, LoraSpec.model_validate(lora))
