"""Bottleneck adapters through a pipeline: RL against the base, evaluated, killed and resumed, exported by names of their own; no whole export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.stages.api import export_checkpoint
from tests.policy.test_bottleneck import hooked
from tests.policy.test_lora_laws import Folders
from tests.stages.killing import finish, metric_lines, tensor_files
from tests.stages.test_lora import arguments_of, logits
from tests.stages.test_virtual_tokens import SPEC


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(900)
def test_bottleneck_adapters_are_trained_exported_and_survive_a_kill(tmp_path: Path) -> None:
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    adapter = "policy.adapter={kind: bottleneck, width: 4, activation: silu}"
    given = [[*arguments_of(output, SPEC)[:3], adapter] for output in (whole, cut)]
    assert finish(given[0], log, 600) == 0, log.read_text()
    _, *lines = metric_lines(whole / "rl")
    assert lines[0]["kl"] == 0.0 < lines[-1]["kl"] and all(line["gap/p99"] < 1e-4 for line in lines)
    told = json.loads((whole / "evaluate" / "report" / "report.json").read_text())["results"]["rl"]["metrics"]
    assert {name: lines[-1][name] for name in told} == told and "eval/avg@4" in told
    exported = whole / "export" / "model"
    said = json.loads((exported / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(tmp_path / "model") and said["adapter_kind"] == "bottleneck"
    model, leaves = hooked(Folders(tmp_path / "model", exported, whole))
    adapted = logits(model)
    for leaf in leaves.values():
        leaf.detach().zero_()
    assert float((adapted - logits(model)).abs().max()) > 1e-3
    assert finish(given[1], log, 600, fault="optimizer.mid:2") != 0
    assert finish(["resume", str(cut)], log, 600) == 0, log.read_text()
    ends = [tensor_files(run / "rl" / "checkpoints" / "step_3") for run in (whole, cut)]
    assert ends[0] == ends[1] and any(name.startswith("adapter/") for name in ends[0])
    assert metric_lines(cut / "rl") == metric_lines(whole / "rl")
    with pytest.raises(InputError, match="has bottleneck adapters"):
        export_checkpoint(whole, tmp_path / "merged", ExportStageSpec())
