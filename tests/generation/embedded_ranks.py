"""Four gloo ranks that generate and score with the embedded engine in one layout: `python -m ... '{...}'`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.embedded import EmbeddedEngine
from nemo_rl_like.generation.types import Completion, Request, Sampling
from nemo_rl_like.model import runtime
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.policy import LayoutSpec
from tests.ports import free_port

WORLD = 4


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks do."""

    requests: list[Request]
    samplings: list[Sampling]
    scored: list[tuple[int, ...]]
    max_batch_rows: int
    record_routes: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank got."""

    completions: list[list[list[Completion]]]
    """By sampling, request, seed."""
    scores: list[list[float]]


def start_engine(
    folder: Path, rank: int, world: int, port: int, layout: LayoutSpec, rows: int, record_routes: bool = False
) -> EmbeddedEngine:
    """Join the world and make the engine."""
    runtime.init_distributed(rank, world, "127.0.0.1", port, layout, 120.0, 1)
    with SafetensorsReader(folder) as reader:
        model = build_model(ModelConfig.from_hf_folder(folder), layout, torch.float32, weights=reader)
    context = RankContext("policy", rank, world, {}, {}, "127.0.0.1", port, 1, folder / "log", "localhost")
    engine = EngineSpec(max_batch_rows=rows)
    return EmbeddedEngine(context, model_handle=model, engine=engine, record_routes=record_routes)


def do(engine: EmbeddedEngine, job: Job) -> Answer:
    """Every sampling, then the scores."""
    return Answer([engine.generate(job.requests, s) for s in job.samplings], engine.score(job.scored))


def run(folder: Path, job: Job, layout: LayoutSpec, scratch: Path) -> list[Answer]:
    """Every rank's answer. A rank that fails fails the caller with its output."""
    (scratch / "job.pickle").write_bytes(pickle.dumps(job))
    port, ranks = free_port(), []
    for rank in range(WORLD):
        task = {
            "rank": rank,
            "port": port,
            "folder": str(folder),
            "scratch": str(scratch),
            "layout": layout.model_dump(),
        }
        with (scratch / f"rank{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", "tests.generation.embedded_ranks", json.dumps(task)]
            ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    try:
        codes = [process.wait(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = "\n".join((scratch / f"rank{rank}.log").read_text(errors="replace")[-2000:] for rank in range(WORLD))
    assert codes == [0] * WORLD, logs
    return [pickle.loads((scratch / f"rank{rank}.pickle").read_bytes()) for rank in range(WORLD)]


def main() -> None:
    """One rank."""
    task = json.loads(sys.argv[1])
    scratch, layout = Path(task["scratch"]), LayoutSpec.model_validate(task["layout"])
    # Unpickled classes must be those of this module's importable name, not of `__main__`.
    from tests.generation import embedded_ranks

    job: embedded_ranks.Job = pickle.loads((scratch / "job.pickle").read_bytes())
    place = (Path(task["folder"]), task["rank"], WORLD, task["port"])
    engine = start_engine(*place, layout, job.max_batch_rows, job.record_routes)
    answer = embedded_ranks.do(engine, job)
    (scratch / f"rank{task['rank']}.pickle").write_bytes(pickle.dumps(answer))
    runtime.shutdown_distributed()


if __name__ == "__main__":
    main()
