"""One run and all its bundles, made once; tests that break a bundle work on a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.stages.api import export_checkpoint
from tests.export.made import add_adapters, make_run

KINDS = ("hf", "hf-lora", "triton-python", "triton-vllm", "triton-trtllm", "nim", "nim-lora", "gguf")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint has adapters."""
    run = tmp_path_factory.mktemp("exported") / "run"
    add_adapters(make_run(run))
    return run


@pytest.fixture(scope="session")
def bundles(run_folder: Path) -> Path:
    """A folder with a bundle of each kind, by name."""
    out = run_folder.parent / "bundles"
    (adapter,) = export_checkpoint(run_folder, run_folder.parent / "adapter", ExportStageSpec(adapter=True))
    targets: list[dict[str, object]] = [{"kind": kind} for kind in KINDS]
    targets[KINDS.index("triton-vllm")] |= {"adapters": {"sums": str(adapter)}, "max_model_len": 64, "max_batch": 4}
    stage = ExportStageSpec.model_validate({"targets": targets, "parity": "weights"})
    export_checkpoint(run_folder, out, stage)
    return out


@pytest.fixture
def copy_of(bundles: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Gives a copy of a bundle that may be broken; its manifest is gone, so that the layout alone is judged."""

    def copied(kind: str) -> Path:
        folder = tmp_path / kind
        shutil.copytree(bundles / kind, folder)
        (folder / "manifest.json").unlink()
        return folder

    return copied
