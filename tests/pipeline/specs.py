"""The spec that pipeline tests run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_like.pipeline.records import read_status
from nemo_rl_like.spec.experiment import ExperimentSpec

CHAIN: dict[str, Any] = {
    "model": {"init": {}, "tokenizer": {"characters": "01"}},
    "environment": {"name": "arithmetic"},
    "stages": [
        {"kind": "sft", "steps": 3, "data": {"environment_demonstrations": True}},
        {"kind": "rl", "steps": 2},
        {"kind": "evaluate"},
        {"kind": "export"},
    ],
}


def chain(output: Path, stages: Mapping[str, Mapping[str, Any]] | None = None, **top: Any) -> ExperimentSpec:
    """The four-stage chain, with fields of stages replaced by kind and top-level blocks by name."""
    changed = [{**s, **(stages or {}).get(s["kind"], {})} for s in CHAIN["stages"]]
    return ExperimentSpec.model_validate({**CHAIN, **top, "output": str(output), "stages": changed})


def results(folder: Path) -> dict[str, Any]:
    """What a run made, without times: every file of the stages, and each stage's state, key and output."""
    names = ("sft", "rl", "evaluate", "export")
    files = {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for n in names
        for p in sorted((folder / n).rglob("*"))
        if p.is_file()
    }
    status = {n: (r.state, r.key, r.output) for n, r in read_status(folder).stages.items()}
    return {"files": files, "status": status}
