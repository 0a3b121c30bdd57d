"""An `rl` stage on a model with experts, whose updates choose the experts of the pass before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.killing import finish, outcome, write_spec

EXPERTS = (
    "model.init.family=qwen3_moe",
    "model.init.experts=4",
    "policy.router={balance_loss: 0.01, replay: first_pass}",
)


@pytest.mark.service
@pytest.mark.timeout(600)
def test_updates_with_replayed_experts_start_at_a_ratio_of_one(tmp_path: Path) -> None:
    spec, log = str(write_spec(tmp_path, tmp_path / "whole", steps=2)), tmp_path / "log"
    single = ("stages.rl.updates_per_batch=1", "stages.rl.algorithm.recompute_proximal=always")
    assert finish(["run", spec, *EXPERTS, *single], log, 500) == 0, log.read_text()
    for metrics in outcome(tmp_path / "whole").metrics:
        assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["experts/max_load"] >= 1.0


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_replayed_experts_survives_a_kill(tmp_path: Path) -> None:
    log = tmp_path / "log"
    specs = {name: str(write_spec(tmp_path, tmp_path / name, steps=4)) for name in ("whole", "cut")}
    assert finish(["run", specs["whole"], *EXPERTS], log, 600) == 0, log.read_text()
    assert finish(["run", specs["cut"], *EXPERTS], log, 600, fault="optimizer.mid:6") != 0
    assert finish(["run", specs["cut"], *EXPERTS, "--resume"], log, 600) == 0, log.read_text()
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
