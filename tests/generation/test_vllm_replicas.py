"""Two vLLM replicas beside a real policy: they share the requests, and no replica's weights are taken on trust."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.training import engine as engine_module
from nemo_rl_like.training.engine import SERVICE, RunEngine
from nemo_rl_like.weights.errors import WeightSyncError

from .tiny_models import Q, save, tiny_llama

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(900)]
REPLICAS = 2
SPEC = EngineSpec(kind="vllm", replicas=REPLICAS, kv_cache_gib=0.02, max_batch_rows=16, max_context=160)
SAMPLING = Sampling(max_new_tokens=8, ignore_stop=True)
REQUESTS = [Request(f"r{i}", tuple(range(i, 20 + 2 * i)), (10 * i, 10 * i + 1)) for i in range(7)]


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunEngine]:
    files = set(os.listdir("/dev/shm"))
    folder = save(tiny_llama(), tmp_path_factory.mktemp("model"))
    start = ClusterSpec(object_store_gib=0.1, start_timeout_s=300, devices=2)
    with RaySession.start(start, tmp_path_factory.mktemp("run")) as session:
        policy = Policy.start(session, PolicySpec(threads_per_rank=1), folder, "float32")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "VLLM", f"{__package__}.faulty_engine:FaultyEngine")
            engine = RunEngine.start(SPEC, policy, folder, "float32", ModelConfig.from_hf_folder(folder))
        yield engine
        engine.close()
        policy.group.shutdown()
    assert not {f for f in set(os.listdir("/dev/shm")) - files if f.startswith(("psm_", "sem."))}


@pytest.fixture
def engine(shared_engine: RunEngine) -> Iterator[RunEngine]:
    """Two replicas that hold the policy's weights; a planted fault is gone after the test."""
    shared_engine.sync(shared_engine.version + 1)
    asked(shared_engine)
    yield shared_engine
    for rank in range(REPLICAS):
        plant(shared_engine, rank, "")


def plant(engine: RunEngine, rank: int, fault: str) -> None:
    engine.group.call(SERVICE, "plant", fault, ranks=[rank])


def asked(engine: RunEngine) -> list[list[str]]:
    """Ids of the requests that each replica got since the last call."""
    pending = engine.group.submit(SERVICE, "asked")
    engine.group.wait(pending)
    return list(ray.get(list(pending.values)))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints with other weights, one after another: what optimizer steps would leave."""
    folders = [tmp_path_factory.mktemp("step") for _ in range(2)]
    for seed, folder in enumerate(folders, 1):
        save(tiny_llama(seed=seed), folder / "weights")
    return itertools.cycle(folders)


def test_replicas_share_the_requests_and_the_results_come_in_request_order(engine: RunEngine) -> None:
    got = engine.client().generate(REQUESTS, SAMPLING)
    assert asked(engine) == [["r0", "r2", "r4", "r6"], ["r1", "r3", "r5"]]
    for rank in range(REPLICAS):
        alone = engine.group.call(SERVICE, "generate", REQUESTS, SAMPLING, ranks=[rank])
        assert [[c.ids for c in group] for group in got] == [[c.ids for c in group] for group in alone]
    assert {c.version for group in got for c in group} == {engine.version}


def test_fewer_requests_than_replicas_leave_one_idle(engine: RunEngine) -> None:
    ((completion,),) = engine.client().generate([Request("alone", (1, 2, 3), (5,))], SAMPLING)
    assert len(completion.ids) == 8 and asked(engine) == [["alone"], []]


def test_a_sync_reaches_every_replica(engine: RunEngine, steps: Iterator[Path]) -> None:
    engine.policy.load(next(steps))
    with pytest.raises(WeightSyncError, match=r"probe prompts at weight version .*, engine rank 0: .*p99"):
        engine.probe()
    version = engine.version + 1
    metrics = engine.sync(version)
    assert metrics["probe/max"] < 1e-4
    for rank in range(REPLICAS):
        samples = engine.group.call(SERVICE, "generate", REQUESTS[:1], SAMPLING, ranks=[rank])
        assert {c.version for group in samples for c in group} == {version}


@pytest.mark.parametrize("rank", range(REPLICAS))
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("flip", rf"different bytes at the receiver \(sha256\): {Q}$"),
        ("false_report", rf"different bytes at the receiver \(sha256\): {Q}$"),
        ("skip", rf"received but not consumed by the engine's model: {Q}$"),
        ("stale", r"p99 .* limit 0.001"),
    ],
)
def test_a_fault_in_one_replica_stops_the_step_and_names_it(
    engine: RunEngine, steps: Iterator[Path], rank: int, fault: str, message: str
) -> None:
    plant(engine, rank, fault)
    engine.policy.load(next(steps))
    with pytest.raises(WeightSyncError, match=rf"engine rank {rank}: .*{message}"):
        engine.sync(engine.version + 1)
