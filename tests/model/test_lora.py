"""Which projections of a family cannot have an adapter (what adapters compute: tests/policy/test_lora_laws.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.lora import check_targets
from nemo_rl_like.spec.policy import LoraSpec


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
        (
            "mixtral",
            ("up_proj",),
            "in experts of a mixtral model",
            ("q_proj", "k_proj", "v_proj", "o_proj"),
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
