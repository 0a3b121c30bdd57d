"""`Backend`: what trains the model under a `PolicyRank`. Megatron Core is one, PyTorch's FSDP2 over transformers' models another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from nemo_rl_like.algorithms.objectives import Outputs
from nemo_rl_like.model.layouts import MicroBatch
from nemo_rl_like.model.router import RouterWatch
from nemo_rl_like.model.top_logprobs import TopLogprobs
from nemo_rl_like.policy.walk import Walk
from nemo_rl_like.spec.optimizer import OptimizerSpec
from nemo_rl_like.tensors.packed import Packed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Score: TypeAlias = Callable[[MicroBatch, Tensor], Tensor]
"""A pass and its scored hidden states [M, H] -> the loss of its rows, a scalar."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The model that a rank is to hold."""

    folder: Path
    """Hugging Face folder."""
    dtype: torch.dtype
    initialize: int | None = None
    """Seed of a model from scratch; None: the folder has weights."""
    score_head: bool = False
    """Put a head of one number a token on a folder that has none."""
    score_head_seed: int | None = None
    """Draw that head; None: zeros."""
    adapter_seed: int | None = None
    """Put the adapters of `policy.lora` or `policy.adapter` on it; None: the whole model is trained."""
    on_host: bool = False
    """Keep its weights in host memory but for passes; it is not trained then."""
    timeout_s: float = 600.0
    """Bound of each collective, in seconds."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one optimizer step reports: gradient norm before clipping and the learning rate used."""

    grad_norm: float
    lr: float


@dataclass(frozen=True, slots=True)
class TopRequest:
    """Which of the likeliest tokens of a pass are asked for."""

    k: int
    temperature: float
    below: int | None
    """Only ids below this; None: all."""


class Backend(Protocol):
    """One rank's shard of a model. Every method is collective: all ranks call it with the same arguments."""

    @property
    def model(self) -> torch.nn.Module:
        """This rank's part, in training or not."""
        ...

    @property
    def replicas(self) -> tuple[int, int]:
        """Data-parallel ranks, and which of them this is."""
        ...

    @property
    def pair_cost(self) -> float:
        """See `layouts.attention_pair_cost`."""
        ...

    @property
    def watch(self) -> RouterWatch | None:
        """Of a model with experts whose routers have losses and metrics."""
        ...

    @property
    def virtual_tokens(self) -> tuple[int, ...]:
        """Ids that stand before each row."""
        ...

    @property
    def updates(self) -> int:
        """Optimizer steps made so far."""
        ...

    def start_training(self, spec: OptimizerSpec, total_updates: int) -> None:
        """Make gradients' buffers and the optimizer; its schedule spans `total_updates` steps."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients of the last step. Raises RuntimeError before `start_training`."""
        ...

    def step(self) -> OptimizerStep | None:
        """Clip, and update the weights; None if a gradient is not finite, and all is then as before."""
        ...

    def run(self, micro_batches: Sequence[MicroBatch], score: Score, *, training: bool, finalize: bool = True) -> None:
        """Pass all micro-batches through the model to `score`, with gradients of its losses if `training`.

        Losses are summed as they are, over passes and ranks. Without `finalize` another `run` adds to the gradients.
        """
        ...

    def outputs(self, hidden: Tensor, micro_batch: MicroBatch, walk: Walk, candidates: Tensor | None) -> Outputs:
        """Inside `score`: what the head says of the pass's tokens, and of further `candidates` [M, K] in their places."""
        ...

    def top(self, hidden: Tensor, micro_batch: MicroBatch, asked: TopRequest) -> TopLogprobs:
        """Inside `score`: the likeliest tokens after each of the pass's scored places."""
        ...

    def share(self, values: Tensor) -> Tensor:
        """The sum over data-parallel ranks of what each computed, in place and on every rank: one all-reduce."""
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside the block the model is as its adapters found it."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every weight by Hugging Face name, whole on rank 0 and None elsewhere; every rank must run it to its end."""
        ...

    def sections(self, prefix: str) -> Iterator[tuple[str, Iterator[Packed]]]:
        """This rank's share of a checkpoint: weights and, in training, the optimizer's state; see `PolicyStore.sections`."""
        ...

    def write_beside(self, folder: Path, prefix: str) -> None:
        """Write what stands beside the tensors of `sections`; see `PolicyStore.write_beside`."""
        ...

    def load(self, folder: Path, updates: int | None, prefix: str) -> None:
        """Load weights of a checkpoint; with `updates`, in training, also the optimizer's state after that many steps."""
        ...
