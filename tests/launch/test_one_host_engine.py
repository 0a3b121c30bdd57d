"""vLLM takes its weights through one host's memory: a job of several is refused by name, before and after placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.joined import JobCluster
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.preflight import check_engine
from nemo_rl_like.training.engine import _require_one_host


@dataclass(frozen=True)
class Group:
    """Where ranks stand."""

    addresses: tuple[str, ...]


@pytest.mark.parametrize(("nodes", "kind", "refused"), [(2, "vllm", True), (2, "embedded", False), (1, "vllm", False)])
def test_a_job_of_several_hosts_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, nodes: int, kind: str, refused: bool
) -> None:
    values = {
        "output": "run",
        "model": {"init": {}, "tokenizer": {"characters": "0123456789+="}},
        "environment": {"name": "arithmetic"},
        "engine": {"kind": kind},
        "stages": [{"kind": "evaluate"}],
    }
    cluster = JobCluster("10.0.0.1:12001", "token", "cpu", 2 * nodes, nodes)
    for name, value in cluster.variable().items():
        monkeypatch.setenv(name, value)
    spec = ExperimentSpec.model_validate(values)
    if not refused:
        return check_engine(spec)
    with pytest.raises(
        SpecError, match=r"`engine\.kind` is vllm, and the job has 2 hosts \(`launch\.nodes`\).*embedded"
    ):
        check_engine(spec)


def test_a_replica_on_another_host_than_the_trainer_is_named() -> None:
    trainer = cast(WorkerGroup, Group(("10.0.0.1", "10.0.0.2")))
    _require_one_host(trainer, cast(WorkerGroup, Group(("10.0.0.1", "10.0.0.1"))))
    with pytest.raises(
        SpecError, match=r"its replica 1 stands on 10\.0\.0\.2, the trainer's first rank on 10\.0\.0\.1"
    ):
        _require_one_host(trainer, cast(WorkerGroup, Group(("10.0.0.1", "10.0.0.2"))))
