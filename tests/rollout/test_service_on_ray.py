"""Laws of the rollout service in a real worker: the driver gets a reference, and no environment process outlives the worker."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.rollout.collected import CollectPlan
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.evaluate import EvaluationSpec
from nemo_rl_like.spec.stage import SamplingSpec
from tests.rollout.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.service
TOKENIZER = character_tokenizer("0123456789+=")
SERVICE = "nemo_rl_like.rollout.service:RolloutService"
WORKER = "nemo_rl_like.environment.worker"


def _add(prompt: tuple[int, ...], seed: int) -> list[int]:
    left, right = TOKENIZER.decode(list(prompt)).removeprefix("<bos>").removesuffix("=").split("+")
    return [*TOKENIZER(str(int(left) + int(right)), add_special_tokens=False).input_ids, TOKENIZER.eos_token_id]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaySession]:
    spec = ClusterSpec(object_store_gib=0.1, start_timeout_s=120, devices=1)
    with RaySession.start(spec, tmp_path_factory.mktemp("run")) as started:
        yield started


def _environment_processes(run_id: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if WORKER in process.cmdline() and process.environ().get("NRL_RUN_ID") == run_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def _kwargs(folder: Path, spec: EnvironmentSpec) -> dict[str, object]:
    TOKENIZER.save_pretrained(folder)
    return {
        "environment_json": spec.model_dump_json(),
        "tokenizer_folder": str(folder),
        "run_seed": 1,
        "max_context": 64,
    }


def test_a_step_goes_to_the_store_and_environments_die_with_the_killed_worker(
    session: RaySession, tmp_path: Path
) -> None:
    group = WorkerGroup.start("rollout", session=session, axes={"worker": 1}, threads=1, devices=0.0)
    group.host("rollout", SERVICE, _kwargs(tmp_path, EnvironmentSpec(name="arithmetic", processes=2)))
    ids = group.call("rollout", "task_list", "train").ids[:4]
    engine = ScriptedEngine(_add)
    reference, summary = group.call(
        "rollout", "collect_to_store", CollectPlan(1, tuple(ids), 2, 0, SamplingSpec(max_new_tokens=8)), engine
    )
    assert ray.get(reference).rewards["reward"].tolist() == [1.0] * 8
    assert summary.rewards["reward"].mean == 1.0
    report = group.call("rollout", "evaluate", EvaluationSpec(split="test", tasks=10, max_new_tokens=8), engine)
    assert report.greedy == 1.0

    processes = _environment_processes(session.run_id)
    assert len(processes) == 2
    os.kill(processes[0].ppid(), 9)
    end = time.monotonic() + 20
    while _environment_processes(session.run_id) and time.monotonic() < end:
        time.sleep(0.2)
    assert not _environment_processes(session.run_id)
    group.shutdown()


def test_an_environment_that_cannot_be_made_is_one_error_with_the_reason(session: RaySession, tmp_path: Path) -> None:
    with WorkerGroup.start("other", session=session, axes={"worker": 1}, threads=1, devices=0.0) as group:
        spec = EnvironmentSpec(name="arithmetics")
        with pytest.raises(NrlError, match="did you mean 'arithmetic'"):
            group.host("rollout", SERVICE, _kwargs(tmp_path, spec))
