"""One spec that has every block, as plain values."""

from __future__ import annotations

import copy
from typing import Any

from nemo_rl_like.spec.experiment import ExperimentSpec

FULL: dict[str, Any] = {
    "output": "runs/x",
    "model": {"init": {}, "tokenizer": {"characters": "0123456789+="}},
    "environment": {"name": "arithmetic"},
    "stages": [
        {"kind": "pretrain", "data": {"paths": ["text.txt"]}},
        {"kind": "sft", "data": {"environment_demonstrations": True}},
        {"kind": "rl", "evaluation": {}},
        {"kind": "preference", "data": {"path": "pairs.jsonl"}, "reference_sync": {}},
        {"kind": "distill", "data": {"path": "rows.jsonl"}, "teachers": [{"path": "teacher"}]},
        {"kind": "teacher_logits", "data": {"path": "rows.jsonl"}, "teachers": [{"path": "teacher"}]},
        {"kind": "sample"},
        {"kind": "evaluate"},
        {"kind": "export"},
    ],
    "secrets": {"HUB": {"env": "HUB_TOKEN"}},
}


def full_spec() -> ExperimentSpec:
    """The spec with every default filled in."""
    return ExperimentSpec.model_validate(copy.deepcopy(FULL))


def full_values() -> dict[str, Any]:
    """Every key of every block, as plain values."""
    return full_spec().model_dump(mode="json")
