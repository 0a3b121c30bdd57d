"""`FsdpBackend`: a model of transformers, sharded over ranks by PyTorch's FSDP2, under a `PolicyRank`.

Parameters, their gradients and the optimizer's state are float32 shards. A layer's weights are gathered in the model's type for its
passes, and their gradients summed in float32. Gradients are plain sums over passes and ranks, as the losses carry global denominators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nemo_rl_like.algorithms.objectives import Outputs
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.model import runtime
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader, TensorReader
from nemo_rl_like.model.layouts import MicroBatch
from nemo_rl_like.model.merged_reader import open_weights
from nemo_rl_like.model.router import RouterWatch
from nemo_rl_like.model.scratch import ScratchReader
from nemo_rl_like.model.top_logprobs import TopLogprobs, top_logprobs
from nemo_rl_like.model.transformers_model import TransformersModel, empty_model, give_memory, recompute_blocks
from nemo_rl_like.policy.backend import ModelRequest, OptimizerStep, Score, TopRequest
from nemo_rl_like.policy.fsdp_optimizer import ShardedOptimizer
from nemo_rl_like.policy.fsdp_probe import check_outputs
from nemo_rl_like.policy.fsdp_store import ShardedStore
from nemo_rl_like.policy.walk import Walk, head_outputs
from nemo_rl_like.spec.optimizer import OptimizerSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tensors.packed import Packed


class FsdpBackend:
    """One rank's shards of the model and, once training starts, of the optimizer's state; see `Backend`.

    Raises InputError for a model that transformers does not compute as the policy needs it (`check_outputs`).
    """

    watch: RouterWatch | None = None
    virtual_tokens: tuple[int, ...] = ()

    def __init__(self, context: RankContext, policy: PolicySpec, request: ModelRequest) -> None:
        runtime.join_world(
            context.rank,
            context.world_size,
            context.master_addr,
            context.master_port,
            request.timeout_s,
            context.threads,
        )
        if request.dtype is torch.float32:
            runtime.exact_float32()
        self._spec = policy
        self.model = empty_model(request.folder)
        recompute_blocks(self.model, policy.recompute)
        shard(self.model, request.dtype)
        give_memory(self.model, runtime.device())
        self.store = ShardedStore(self.model, request.dtype, request.folder)
        self.store.fill(_weights(request))
        self._optimizer: ShardedOptimizer | None = None
        check_outputs(self.model, policy.rows, request)

    @property
    def replicas(self) -> tuple[int, int]:
        """See `Backend`: every rank."""
        return dist.get_world_size(), dist.get_rank()

    @property
    def pair_cost(self) -> float:
        """See `Backend`."""
        blocks = self.model.blocks
        parameters = sum(p.numel() for block in blocks for p in block.parameters())
        return 2 * int(self.model.hf.config.hidden_size) * len(blocks) / max(1, parameters)

    # -- training

    @property
    def optimizer(self) -> ShardedOptimizer:
        """Raises RuntimeError before `start_training`."""
        if self._optimizer is None:
            raise RuntimeError("start_training must come before train_step")
        return self._optimizer

    @property
    def updates(self) -> int:
        """See `Backend`."""
        return self.optimizer.updates

    def start_training(self, spec: OptimizerSpec, total_updates: int) -> None:
        """See `Backend`."""
        self._optimizer = ShardedOptimizer(self.model.trained(), spec, total_updates)

    def zero_grad(self) -> None:
        """See `Backend`."""
        self.optimizer.zero_grad()

    def step(self) -> OptimizerStep | None:
        """See `Backend`."""
        return self.optimizer.step()

    # -- passes

    def run(self, micro_batches: Sequence[MicroBatch], score: Score, *, training: bool, finalize: bool = True) -> None:
        """See `Backend`; gradients are summed over ranks after each pass, so `finalize` changes nothing."""
        with torch.set_grad_enabled(training):
            for micro_batch in micro_batches:
                loss = self._pass(micro_batch, score)
                if training:
                    loss.backward()
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # without a backward pass nothing else gives the outermost weights back

    def _pass(self, micro_batch: MicroBatch, score: Score) -> Tensor:
        moved = micro_batch.to(runtime.device(), torch.float32)
        loss: Tensor = self.model(lambda: score(moved, self.model.hidden(moved)))
        return loss

    def outputs(self, hidden: Tensor, micro_batch: MicroBatch, walk: Walk, candidates: Tensor | None) -> Outputs:
        """See `Backend`. A model's scale of its logits is one of the temperature."""
        scaled = replace(walk, temperature=walk.temperature / self.model.logit_scale)
        chunk_tokens = self._spec.logprob_chunk_tokens
        return head_outputs(hidden, self.model.head(), micro_batch.targets, scaled, candidates, chunk_tokens)

    def top(self, hidden: Tensor, micro_batch: MicroBatch, asked: TopRequest) -> TopLogprobs:
        """See `Backend`."""
        return top_logprobs(
            hidden,
            self.model.head(),
            asked.k,
            temperature=asked.temperature / self.model.logit_scale,
            chunk_tokens=self._spec.logprob_chunk_tokens,
            below=asked.below,
        )

    def share(self, values: Tensor) -> Tensor:
        """See `Backend`."""
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        return values

    def without_adapters(self) -> AbstractContextManager[None]:
        """See `Backend`: there are none."""
        return nullcontext()

    # -- weights out and in

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """See `Backend`."""
        return self.store.weights()

    def sections(self, prefix: str) -> Iterator[tuple[str, Iterator[Packed]]]:
        """See `Backend`."""
        return self.store.sections(self._optimizer, prefix)

    def write_beside(self, folder: Path, prefix: str) -> None:
        """See `Backend`."""
        self.store.write_beside(folder, self._optimizer, prefix)

    def load(self, folder: Path, updates: int | None, prefix: str) -> None:
        """See `Backend`."""
        with SafetensorsReader(folder / f"{prefix}weights") as weights:
            self.store.fill(weights)
        if self._optimizer is not None and updates is not None:
            self.store.load_optimizer(folder / f"{prefix}optimizer", self._optimizer, updates)


def shard(model: TransformersModel, dtype: torch.dtype) -> None:
    """Shard every layer, and what is outside them as one, over all ranks; they compute in `dtype`."""
    mesh = init_device_mesh(runtime.device().type, (dist.get_world_size(),))
    types = MixedPrecisionPolicy()
    if dtype is not torch.float32:
        types = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=types)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _weights(request: ModelRequest) -> TensorReader:
    """What the model starts from."""
    if request.initialize is None:
        return open_weights(request.folder)
    return ScratchReader(ModelConfig.from_hf_folder(request.folder), request.initialize, request.dtype)
