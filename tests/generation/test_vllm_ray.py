"""The vLLM engine inside a Ray worker: it works there, and dies with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.generation.segments import descendants
from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.weights.shared_memory import SharedMemorySender

from .test_vllm_processes import wait_for_end
from .tiny_models import named_weights, save, scores, tiny_llama


@pytest.mark.slow
@pytest.mark.service
def test_an_engine_in_a_ray_worker_syncs_and_leaves_no_orphan_when_the_worker_is_killed(tmp_path: Path) -> None:
    files = set(os.listdir("/dev/shm"))
    folder = save(tiny_llama(), tmp_path / "model")
    spec = ClusterSpec(object_store_gib=0.1, start_timeout_s=240, devices=2)
    kwargs: dict[str, object] = {
        "model_folder": str(folder),
        "dtype": "float32",
        "engine": EngineSpec(kind="vllm", kv_cache_gib=0.02, max_batch_rows=8),
    }
    prompt, trained = tuple(range(40)), tiny_llama(seed=1)
    with RaySession.start(spec, tmp_path) as session, SharedMemorySender() as sender:
        group = WorkerGroup.start("engine", session=session, axes={"replica": 1}, threads=1)
        group.host("engine", "nemo_rl_like.generation.vllm:VllmEngine", kwargs)
        handle = sender.publish(3, named_weights(trained).items())
        group.call("engine", "update_weights", 3, handle, what="sync")
        pending = group.submit("engine", "generate", [Request("r", prompt, (1, 2))], Sampling(max_new_tokens=6))
        ((sample, _),) = ray.get(list(pending.values))[0]
        reference = scores(trained, [prompt + sample.ids])[0][len(prompt) - 1 :]
        assert sample.version == 3 and sample.logprobs == pytest.approx(reference, abs=1e-4)
        owner = group.client().workers[0].info.pid
        family = descendants(owner)
        assert len(family) >= 2
        os.kill(owner, signal.SIGKILL)
        assert not wait_for_end(family, 10)
    assert not {f for f in set(os.listdir("/dev/shm")) - files if f.startswith(("psm_", "sem."))}
