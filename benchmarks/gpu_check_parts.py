"""What the lines of `gpu_check.py` are made of: models, batches, runs of steps and their comparison."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from peer import one_rank
from torch import Tensor

from nemo_rl_like.algorithms.policy_gradient import PolicyGradient
from nemo_rl_like.generation.types import Completion, Request
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import write_hf_folder
from nemo_rl_like.model.scratch import ScratchReader
from nemo_rl_like.policy.rank import PolicyRank, Walk
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows
from nemo_rl_like.weights.cuda_ipc import CudaIpcHandle

DType = Literal["float32", "bfloat16"]
TEMPERATURE, BETA1, STEPS = 0.8, 0.9, 3
_OPTIMIZER = AdamWOptimizer(lr=1e-3, clip_grad=0.0, betas=(BETA1, 0.999))


@dataclass(frozen=True, slots=True)
class Run:
    """What a few steps gave, on the CPU."""

    logprobs: Tensor
    """float32 [N] before the first step."""
    gradient: dict[str, Tensor]
    """Of the first step, by Hugging Face name."""
    metrics: list[dict[str, float]]
    """Of each step."""


def small_config() -> ModelConfig:
    """A Llama that a CPU trains in seconds, of widths that every FP8 recipe takes."""
    return ModelConfig(
        family="llama", vocab_size=1000, hidden_size=256, intermediate_size=512, layers=4, heads=4, kv_heads=2, head_dim=64,
        max_positions=512, rope_theta=10000.0, norm_eps=1e-5, tie_embeddings=False, init_std=0.06,
    )  # fmt: skip


def big_config(layers: int, hidden: int = 4096) -> ModelConfig:
    """A Llama of the 8B model's proportions with fewer layers."""
    return ModelConfig(
        family="llama", vocab_size=32768, hidden_size=hidden, intermediate_size=hidden * 7 // 2, layers=layers,
        heads=hidden // 128, kv_heads=max(1, hidden // 512), head_dim=128, max_positions=8192, rope_theta=500000.0,
        norm_eps=1e-5, tie_embeddings=False,
    )  # fmt: skip


def write_model(folder: Path, config: ModelConfig, dtype: DType) -> None:
    """A Hugging Face folder with random weights."""
    folder.mkdir()
    reader = ScratchReader(config, 1, getattr(torch, dtype))
    write_hf_folder(folder, config, ((name, reader.get(name)) for name in reader.keys()), None, 1 << 30)


def policy(
    folder: Path, dtype: DType, spec: PolicySpec, *, config: ModelConfig | None = None, train: bool = False
) -> PolicyRank:
    """The only rank, with the folder's weights, or made from scratch if `config` is given."""
    if config is not None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.to_hf_dict(dtype)))
    seed = None if config is None else 1
    rank = PolicyRank(one_rank(4), folder=str(folder), policy=spec, dtype=dtype, initialize=seed, adapter_seed=1)
    if train:
        rank.start_training(_OPTIMIZER, 1000)
    return rank


def small_batch() -> TokenBatch:
    """6 prompts of 4 samples, all of different lengths, with advantages."""
    generator = torch.Generator().manual_seed(7)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = []
    for group in range(6):
        prompt = torch.randint(1000, (draw(5, 60),), generator=generator).tolist()
        for sample in range(4):
            response = torch.randint(1000, (draw(3, 90),), generator=generator).tolist()
            rows.append(_row(prompt + response, len(prompt), group, 4 * group + sample))
    return _with_advantages(batch_rows(rows), generator)


def big_batch(config: ModelConfig, rows: int, length: int, prompt: int = 1, samples: int = 1) -> TokenBatch:
    """Rows of one length; each `samples` of them share a prompt, and everything after it is trained."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for row in range(rows):
        if row % samples == 0:
            shared = torch.randint(config.vocab_size, (prompt,), generator=generator).tolist()
        own = torch.randint(config.vocab_size, (length - prompt,), generator=generator).tolist()
        made.append(_row(shared + own, prompt, row // samples, row))
    return _with_advantages(batch_rows(made), generator)


def _row(tokens: Sequence[int], prompt_len: int, group: int, episode: int) -> Row:
    trained = [i >= prompt_len for i in range(len(tokens))]
    version = [0 if is_trained else -1 for is_trained in trained]
    return Row(tokens, prompt_len, trained, [0.0] * len(tokens), version, group, group, episode)


def _with_advantages(batch: TokenBatch, generator: torch.Generator) -> TokenBatch:
    per_row = torch.randn(batch.rows, generator=generator)
    return batch.with_extras(advantages=torch.where(batch.loss_mask, per_row[batch.row_of_token], 0.0))


def run_steps(folder: Path, dtype: DType, spec: PolicySpec, batch: TokenBatch, scratch: Path) -> Run:
    """Log-probs, then a few steps; the gradient is Adam's first moment after the first, over 1 - beta1."""
    rank, objective = policy(folder, dtype, spec, train=True), PolicyGradient(on_policy=True)
    logprobs = log_probs(rank, batch, TEMPERATURE)
    metrics = [rank.train_step(batch, None, objective, TEMPERATURE)]
    for section in ("weights", "adapter", "optimizer"):
        (scratch / section).mkdir(parents=True)
    rank.save(str(scratch))
    metrics += [rank.train_step(batch, None, objective, TEMPERATURE) for _ in range(STEPS - 1)]
    return Run(logprobs, _gradient(scratch / "optimizer"), metrics)


def log_probs(rank: PolicyRank, batch: TokenBatch, temperature: float) -> Tensor:
    """float32 [N] of the batch's trained tokens, 0 elsewhere."""
    return rank._walk(batch, batch.trained_per_row > 0, Walk(temperature), training=False).logprobs.cpu()


def _gradient(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, value in load_file(file).items():
            if name.startswith("exp_avg/"):
                found[name.removeprefix("exp_avg/")] = value / (1 - BETA1)
    return found


def compare_runs(ours: Run, theirs: Run) -> dict[str, Any]:
    """How far two runs of the same steps are apart; log-probs in nats."""
    apart = (ours.logprobs - theirs.logprobs)[theirs.logprobs != 0].abs()
    if ours.gradient.keys() != theirs.gradient.keys():
        raise ValueError(f"gradients of different tensors: {sorted(ours.gradient.keys() ^ theirs.gradient.keys())}")
    names = sorted(theirs.gradient)
    mine, other = (torch.cat([g[name].flatten().double() for name in names]) for g in (ours.gradient, theirs.gradient))
    cosines = {
        name: float(torch.cosine_similarity(ours.gradient[name].flatten(), theirs.gradient[name].flatten(), dim=0))
        for name in names
    }
    worst = min(cosines, key=lambda name: cosines[name])
    entropies = [abs(a["entropy"] - b["entropy"]) for a, b in zip(ours.metrics, theirs.metrics, strict=True)]
    return {
        "max_logprob_diff": float(apart.max()),
        "mean_logprob_diff": float(apart.mean()),
        "gradient_relative_error": float((mine - other).norm() / other.norm()),
        "gradient_cosine": float(torch.cosine_similarity(mine, other, dim=0)),
        "worst_tensor": worst,
        "worst_tensor_cosine": cosines[worst],
        "max_entropy_diff": max(entropies),
        "grad_norms": [round(m["grad_norm"], 6) for m in ours.metrics],
    }


def largest_metric_difference(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> float:
    """Over steps and metrics."""
    return max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


def prompts(count: int, samples: int) -> list[Request]:
    """Random prompts of 16 to 79 tokens."""
    generator = torch.Generator().manual_seed(3)
    return [
        Request(
            f"r{i}",
            tuple(torch.randint(32768, (16 + 2 * i,), generator=generator).tolist()),
            tuple(range(i * samples, (i + 1) * samples)),
        )
        for i in range(count)
    ]


def gap_of_samples(
    rank: PolicyRank, asked: Sequence[Request], completions: Sequence[Sequence[Completion]]
) -> tuple[float, float]:
    """99 % quantile and maximum of |engine - trainer| log-prob over the sampled tokens, in nats."""
    rows = []
    for group, (request, samples) in enumerate(zip(asked, completions, strict=True)):
        prompt = list(request.prompt_ids)
        for sample in samples:
            row = _row([*prompt, *sample.ids], len(prompt), group, len(rows))
            rows.append(Row(**{**_fields(row), "behavior": [0.0] * len(prompt) + list(sample.logprobs)}))
    batch = batch_rows(rows)
    apart = (log_probs(rank, batch, 1.0) - batch.behavior)[batch.loss_mask].abs()
    return float(apart.quantile(0.99)), float(apart.max())


def _fields(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}  # type: ignore[attr-defined]


class Receiver:
    """A process of its own that opens what a `CudaIpcSender` published."""

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs,), daemon=True)
        self._process.start()
        return self

    def read(self, handle: CudaIpcHandle) -> tuple[dict[str, str], float]:
        """The checksums it computed by name, and the seconds it took."""
        self._ours.send(handle)
        answer: tuple[dict[str, str], float] | str = self._ours.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.send(None)
        self._process.join(20)
        self._process.kill()


def _receive(pipe: Connection) -> None:
    from nemo_rl_like.weights import cuda_ipc

    torch.cuda.init()
    while (handle := pipe.recv()) is not None:
        began = time.perf_counter()
        try:
            found = {name: digest for name, _, digest in cuda_ipc.read(handle)}
            torch.cuda.synchronize()
            pipe.send((found, time.perf_counter() - began))
        except Exception as error:  # noqa: BLE001 - the other side raises it
            pipe.send(f"{type(error).__name__}: {error}")
