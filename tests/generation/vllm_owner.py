"""Starts a vLLM engine, says so, and waits to be killed. Arguments: model folder, environment mark."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.generation.vllm import VllmEngine
from nemo_rl_like.spec.engine import EngineSpec


def main() -> None:
    folder = sys.argv[1]
    context = RankContext("engine", 0, 1, {"dp": 1}, {"dp": 0}, "127.0.0.1", 0, 1, Path("log"), "localhost")
    spec = EngineSpec(kind="vllm", kv_cache_gib=0.02, max_batch_rows=16)
    engine = VllmEngine(context, model_folder=folder, dtype="float32", engine=spec)
    engine.generate([Request("r", (1, 2, 3), (1,))], Sampling(max_new_tokens=2))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main()
