"""The model families: one small file each, found by their names in a Hugging Face `config.json`.

A new one that differs in what `Family` knows is a file that defines `FAMILY`, named in `_MODULES`, and a tiny model of it in tests/model/tiny.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_like.model.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3_text,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    nemotron,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from nemo_rl_like.model.families.family import ExpertNames, Family, Windows

_MODULES = (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3_text,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    nemotron,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""By `model_type`."""

__all__ = ["FAMILIES", "ExpertNames", "Family", "Windows"]
