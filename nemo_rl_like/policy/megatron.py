"""`MegatronBackend`: Megatron Core's model, DDP, schedules and distributed optimizer under a `PolicyRank`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_like.algorithms.objectives import Outputs
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.model import runtime
from nemo_rl_like.model.bottleneck import add_bottlenecks
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.heads import output_head, token_scores
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.host_weights import HostWeights
from nemo_rl_like.model.layouts import MicroBatch, attention_pair_cost
from nemo_rl_like.model.lora import adapters_off, add_adapters
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.merged_reader import open_weights
from nemo_rl_like.model.pipeline_stage import PipelineStage
from nemo_rl_like.model.prefix import add_prefixes
from nemo_rl_like.model.router import RouterWatch
from nemo_rl_like.model.schedule import Reduce
from nemo_rl_like.model.scratch import FreshScoreReader, ScratchReader
from nemo_rl_like.model.top_logprobs import TopLogprobs, top_logprobs
from nemo_rl_like.model.virtual_tokens import add_virtual_tokens
from nemo_rl_like.policy.backend import ModelRequest, OptimizerStep, Score, TopRequest
from nemo_rl_like.policy.ddp import PolicyDdp, run_schedule, wrap_ddp
from nemo_rl_like.policy.optimizer import PolicyOptimizer
from nemo_rl_like.policy.share import from_last_stages
from nemo_rl_like.policy.store import PolicyStore
from nemo_rl_like.policy.walk import Walk, head_outputs
from nemo_rl_like.spec.optimizer import OptimizerSpec
from nemo_rl_like.spec.policy import AdapterSpec, BottleneckSpec, LoraSpec, PolicySpec, PromptTuningSpec
from nemo_rl_like.tensors.packed import Packed


class MegatronBackend:
    """One rank's shard of the Megatron model and, once training starts, DDP and the optimizer; see `Backend`."""

    def __init__(self, context: RankContext, policy: PolicySpec, request: ModelRequest) -> None:
        layout = policy.layout
        runtime.init_distributed(
            context.rank,
            context.world_size,
            context.master_addr,
            context.master_port,
            layout,
            request.timeout_s,
            context.threads,
        )
        self._spec = policy
        self._config = ModelConfig.from_hf_folder(request.folder)
        adapter = None if request.adapter_seed is None else policy.lora or policy.adapter
        weights = self._weights(request)
        self.model: MegatronModel = build_model(
            self._config,
            layout,
            request.dtype,
            weights=weights,
            fp8=policy.fp8,
            adapters=isinstance(adapter, LoraSpec | BottleneckSpec),
            recompute=policy.recompute,
            base=adapter.base if isinstance(adapter, LoraSpec) else None,
        )
        if request.adapter_seed is not None and adapter is not None:
            self._adapt(adapter, weights, request.adapter_seed)
        self.store = PolicyStore(self.model, self._config, request.folder, adapter, policy.fp8)
        self._trained: tuple[list[PolicyDdp], PolicyOptimizer] | None = None
        self._host = HostWeights(self.model) if request.on_host else None

    def _adapt(self, adapter: LoraSpec | AdapterSpec, weights: TensorReader, seed: int) -> None:
        """Freeze the model and put beside it what is trained in its place."""
        if isinstance(adapter, LoraSpec):
            add_adapters(self.model, self._config, adapter, seed)
        elif isinstance(adapter, BottleneckSpec):
            add_bottlenecks(self.model, self._config, adapter, seed)
        elif isinstance(adapter, PromptTuningSpec):
            add_virtual_tokens(self.model, self._config, adapter, weights, seed)
        else:
            add_prefixes(self.model, self._config, adapter, seed)

    def _weights(self, request: ModelRequest) -> TensorReader:
        """What the model starts from; with a new score head its shape is that of a model with one."""
        weights: TensorReader
        if request.initialize is None:
            weights = open_weights(request.folder)
        else:
            weights = ScratchReader(self._config, request.initialize, request.dtype)
        if request.score_head and not self._config.score_head:
            self._config = replace(self._config, score_head=True)
            weights = FreshScoreReader(weights, self._config, request.score_head_seed)
        return weights

    @property
    def replicas(self) -> tuple[int, int]:
        """See `Backend`."""
        return parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    @property
    def pair_cost(self) -> float:
        """See `Backend`."""
        return attention_pair_cost(self._config)

    @property
    def watch(self) -> RouterWatch | None:
        """See `Backend`."""
        return self.model.watch

    @property
    def virtual_tokens(self) -> tuple[int, ...]:
        """See `Backend`."""
        return () if self.model.virtual_tokens is None else self.model.virtual_tokens.ids

    # -- training

    @property
    def ddp(self) -> list[PolicyDdp]:
        """The model's stages with their gradient buffers. Raises RuntimeError before `start_training`."""
        return self._in_training()[0]

    @property
    def optimizer(self) -> PolicyOptimizer:
        """Raises RuntimeError before `start_training`."""
        return self._in_training()[1]

    @property
    def updates(self) -> int:
        """See `Backend`."""
        return self.optimizer.updates

    def start_training(self, spec: OptimizerSpec, total_updates: int) -> None:
        """See `Backend`."""
        if self._host is not None:
            raise RuntimeError("a model whose weights lie in host memory is not trained")
        ddp = wrap_ddp(self.model)
        on_host = self._spec.offload.optimizer
        optimizer = PolicyOptimizer(self.model, ddp, self.store.trained, spec, total_updates, on_host=on_host)
        self._trained = ddp, optimizer

    def zero_grad(self) -> None:
        """See `Backend`."""
        for stage in self.ddp:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> OptimizerStep | None:
        """See `Backend`."""
        return self.optimizer.step()

    def _in_training(self) -> tuple[list[PolicyDdp], PolicyOptimizer]:
        if self._trained is None:
            raise RuntimeError("start_training must come before train_step")
        return self._trained

    # -- passes

    def run(self, micro_batches: Sequence[MicroBatch], score: Score, *, training: bool, finalize: bool = True) -> None:
        """See `Backend`: Megatron's schedule for the pipeline layout."""
        device = runtime.device()

        def forward(iterator: Iterator[MicroBatch], stage: PipelineStage) -> tuple[Tensor, Reduce]:
            micro_batch = next(iterator).to(device, self.model.dtype)
            return stage(micro_batch), partial(reduced, micro_batch)

        def reduced(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            return score(micro_batch, hidden), torch.zeros((), dtype=torch.int, device=device), None

        wrapped = self.ddp if training and self._trained else None
        with nullcontext() if self._host is None else self._host.on_device():
            run_schedule(self.model, wrapped, micro_batches, forward, training=training, finalize=finalize)

    def outputs(self, hidden: Tensor, micro_batch: MicroBatch, walk: Walk, candidates: Tensor | None) -> Outputs:
        """See `Backend`; equal on every tensor- and context-parallel rank."""
        mine, context = self.model.scored_here(micro_batch), self.model.context
        if mine is None or context is None:
            return self._of_head(hidden, micro_batch.targets, walk, candidates)
        own = self._of_head(hidden, micro_batch.targets[mine], walk, None if candidates is None else candidates[mine])
        count = len(micro_batch.targets)

        def whole(part: Tensor | None) -> Tensor | None:
            return None if part is None else context.whole(part, mine, count)

        return Outputs(
            context.whole(own.logprobs, mine, count),
            whole(own.entropy),
            whole(own.collision),
            whole(own.candidates),
            whole(own.log_norm),
        )

    def _of_head(self, hidden: Tensor, targets: Tensor, walk: Walk, candidates: Tensor | None) -> Outputs:
        if self._config.score_head:
            return Outputs(token_scores(hidden, self.model))
        head, chunk_tokens = output_head(self.model), self._spec.logprob_chunk_tokens
        return head_outputs(hidden, head, targets, walk, candidates, chunk_tokens)

    def top(self, hidden: Tensor, micro_batch: MicroBatch, asked: TopRequest) -> TopLogprobs:
        """See `Backend`. Raises ValueError for a model with a score head."""
        top = top_logprobs(
            hidden,
            output_head(self.model),
            asked.k,
            temperature=asked.temperature,
            chunk_tokens=self._spec.logprob_chunk_tokens,
            below=asked.below,
        )
        mine, context = self.model.scored_here(micro_batch), self.model.context
        if mine is None or context is None:
            return top
        count = len(micro_batch.targets)
        return replace(top, ids=context.whole(top.ids, mine, count), logprobs=context.whole(top.logprobs, mine, count))

    def share(self, values: Tensor) -> Tensor:
        """See `Backend`: what the last pipeline stages hold."""
        return from_last_stages(values)

    def without_adapters(self) -> AbstractContextManager[None]:
        """See `Backend`."""
        return adapters_off(self.model)

    # -- weights out and in

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """See `Backend`."""
        return self.store.weights()

    def sections(self, prefix: str) -> Iterator[tuple[str, Iterator[Packed]]]:
        """See `Backend`."""
        return self.store.sections(None if self._trained is None else self.optimizer, prefix)

    def write_beside(self, folder: Path, prefix: str) -> None:
        """See `Backend`."""
        self.store.write_beside(folder, None if self._trained is None else self.optimizer, prefix)

    def load(self, folder: Path, updates: int | None, prefix: str) -> None:
        """See `Backend`."""
        self.store.load_weights(folder, prefix)
        if self._trained is not None:
            self.optimizer.reload_main_params()
            if updates is not None:
                self.store.load_optimizer(folder / f"{prefix}optimizer", self.optimizer, updates)
