"""A vLLM replica whose model lies in two processes: the same log-probs, and neither process's weights are taken on trust."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.probe import check_gap, probe_gap, probe_prompts
from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.shared_memory import SharedMemorySender

from .faulty_engine import FaultyEngine
from .tiny_models import VOCAB, Q, named_weights, save, scores, tiny_llama

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(900)]
LIMIT = 1e-3
PROBES = list(probe_prompts(VOCAB, count=8, tokens=64))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyEngine]:
    files = set(os.listdir("/dev/shm"))
    folder = save(tiny_llama(), tmp_path_factory.mktemp("model"))
    place = RankContext("engine", 0, 1, {"replica": 1}, {"replica": 0}, "127.0.0.1", 0, 2, Path("log"), "localhost")
    spec = EngineSpec(kind="vllm", kv_cache_gib=0.02, max_batch_rows=16, max_context=160, tensor_parallel=2)
    engine = FaultyEngine(place, model_folder=str(folder), dtype="float32", engine=spec)
    assert not set(os.listdir("/dev/shm")) - files, "the names go once the engine runs"
    yield engine
    engine.close()
    assert not set(os.listdir("/dev/shm")) - files


def test_both_halves_take_over_new_weights(engine: FaultyEngine) -> None:
    check_gap(probe_gap(engine.score(PROBES), scores(tiny_llama(), PROBES)), LIMIT, "before")
    trained = tiny_llama(seed=1)
    with SharedMemorySender() as sender:
        handle = sender.publish(1, named_weights(trained).items())
        report = engine.update_weights(1, handle)
    assert report.consumed == {entry.name for entry in handle.manifest.entries}
    check_gap(probe_gap(engine.score(PROBES), scores(trained, PROBES)), LIMIT, "after")
    prompt = tuple(range(40))
    ((sample, _),) = engine.generate([Request("r", prompt, (1, 2))], Sampling(max_new_tokens=8))
    assert sample.logprobs == pytest.approx(scores(trained, [prompt + sample.ids])[0][39:], abs=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("flip", rf"different bytes at the receiver \(sha256\): {Q}$"),
        ("skip", rf"received but not consumed by the engine's model: {Q}$"),
    ],
)
def test_a_fault_in_one_half_is_told_by_name_and_stops_generation(
    engine: FaultyEngine, rank: int, fault: str, message: str
) -> None:
    engine.plant(fault, rank)
    with SharedMemorySender() as sender, pytest.raises(WeightSyncError, match=rf"engine rank 0: .*{message}"):
        engine.update_weights(
            engine.version + 1, sender.publish(engine.version + 1, named_weights(tiny_llama()).items())
        )
    with pytest.raises(WeightSyncError, match="cannot generate"):
        engine.generate([Request("r", (1, 2, 3), (1,))], Sampling(max_new_tokens=1))


def test_a_stale_half_is_caught_by_the_probe(engine: FaultyEngine) -> None:
    engine.plant("stale", 1)
    trained = tiny_llama(seed=2)
    with SharedMemorySender() as sender:
        version = engine.version + 1
        engine.update_weights(version, sender.publish(version, named_weights(trained).items()))
    report = probe_gap(engine.score(PROBES), scores(trained, PROBES))
    with pytest.raises(WeightSyncError, match="p99"):
        check_gap(report, LIMIT, "probe")
