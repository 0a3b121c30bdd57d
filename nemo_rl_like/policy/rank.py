"""`PolicyRank`: one rank's part of the trainable model, hosted in a worker group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.algorithms.objectives import Auxiliary, Objective, Outputs, StepStats
from nemo_rl_like.artifacts import faults
from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.model import runtime
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.heads import output_head, token_logprobs, token_scores
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader, TensorReader
from nemo_rl_like.model.layouts import MicroBatch, attention_pair_cost, plan_microbatches
from nemo_rl_like.model.lora import add_adapters
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.router import ROUTER_METRICS
from nemo_rl_like.model.scratch import FreshScoreReader, ScratchReader
from nemo_rl_like.policy.background import BackgroundSave, Copies
from nemo_rl_like.policy.ddp import PolicyDdp, Reduce, run_schedule, wrap_ddp
from nemo_rl_like.policy.gap import GAP_METRICS, RATIO_METRICS, GapExceeded, GapLimit, ratio_quantiles, rollout_gap
from nemo_rl_like.policy.optimizer import PolicyOptimizer
from nemo_rl_like.policy.share import from_last_stages
from nemo_rl_like.policy.store import PolicyStore, write_section
from nemo_rl_like.policy.top import TopK, top_of_batch
from nemo_rl_like.spec.optimizer import OptimizerSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tensors.shards import ShardFile
from nemo_rl_like.tokens.batch import TokenBatch
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle, SharedMemorySender

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NonFinite(NrlError):
    """The loss or a gradient is not finite; the step was not made."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk over a batch's rows: at which temperature, and which loss (None: log-probs only)."""

    temperature: float
    objective: Objective | None = None
    stats: StepStats | None = None
    keep_entropy: bool = False
    """Return the entropy of every scored token too."""
    scale: float = 1.0
    """Multiplies the loss, not the metrics."""
    finalize: bool = True
    """Sum the gradients over ranks at the end; False: another walk of the same step follows and does it."""

    @property
    def with_entropy(self) -> bool:
        """Whether entropy is computed beside log-probs."""
        return self.keep_entropy or (self.objective is not None and self.objective.needs_entropy)

    @property
    def with_collision(self) -> bool:
        """Whether the log of the sum of squared probabilities is computed beside log-probs."""
        return self.objective is not None and self.objective.needs_collision

    @property
    def with_log_norm(self) -> bool:
        """Whether the log-normaliser is computed beside log-probs."""
        return self.objective is not None and self.objective.needs_log_norm

    def together(self, batch: TokenBatch) -> Tensor | None:
        """int64 [B]: rows of equal numbers are in the same pass."""
        return None if self.objective is None else self.objective.together(batch)


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk found, equal on every rank."""

    logprobs: Tensor
    """float32 [N] log-probs, of a model with a score head the scores; 0 where not scored."""
    entropy: Tensor
    """float32 [N] if it was to be kept, else empty."""
    sums: Tensor
    """Sums of the objective's metrics."""


class PolicyRank:
    """One rank of a policy: its shard of the Megatron model and, once training starts, DDP and the optimizer.

    Args: `context` from the worker group, with axes pp, dp, cp, tp; `folder`, a Hugging Face folder (with weights, unless
    `initialize` gives the seed of a model from scratch); `policy` and `dtype` from the spec; `score_head` puts a head of one
    number a token on a folder that has none (a critic or reward model), zero at first or drawn with `score_head_seed`; with `adapter_seed`
    the adapters of `policy.lora` are put on it and trained alone;
    `timeout_s` bounds each collective, in seconds. Every method is collective: all ranks call it with the same arguments.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        folder: str,
        policy: PolicySpec,
        dtype: str,
        initialize: int | None = None,
        score_head: bool = False,
        score_head_seed: int | None = None,
        adapter_seed: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._context = context
        self._spec = policy
        layout = policy.layout
        runtime.init_distributed(
            context.rank,
            context.world_size,
            context.master_addr,
            context.master_port,
            layout.tp,
            layout.pp,
            timeout_s,
            context.threads,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.etp,
        )
        self.config = ModelConfig.from_hf_folder(Path(folder))
        weights: TensorReader
        if initialize is None:
            weights = SafetensorsReader(Path(folder))
        else:
            weights = ScratchReader(self.config, initialize, DTYPES[dtype])
        if score_head and not self.config.score_head:
            self.config = replace(self.config, score_head=True)
            weights = FreshScoreReader(weights, self.config, score_head_seed)
        lora = None if adapter_seed is None else policy.lora
        self.model: MegatronModel = build_model(
            self.config,
            layout,
            DTYPES[dtype],
            weights=weights,
            fp8=policy.fp8,
            adapters=lora is not None,
            recompute=policy.recompute,
        )
        if lora is not None and adapter_seed is not None:
            add_adapters(self.model, self.config, lora, adapter_seed)
        self._ddp: PolicyDdp | None = None
        self._optimizer: PolicyOptimizer | None = None
        self._store = PolicyStore(self.model, self.config, Path(folder), lora)
        self._background = BackgroundSave()
        self._sender = SharedMemorySender()

    # -- training

    def start_training(self, optimizer: OptimizerSpec, total_updates: int) -> None:
        """Wrap the model for gradients and make the optimizer; `total_updates` optimizer steps span the schedule."""
        self._ddp = wrap_ddp(self.model)
        self._optimizer = PolicyOptimizer(self._ddp, self._store.trained, optimizer, total_updates)

    def train_step(
        self,
        batch: TokenBatch,
        rows: Sequence[int] | None,
        objective: Objective,
        temperature: float = 1.0,
        gap: GapLimit | None = None,
        auxiliary: tuple[TokenBatch, Auxiliary] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on these rows of the batch (None: all of them); returns its metrics.

        With `auxiliary` the gradient is the sum of the objective's and coef times that of the further loss on a batch of its own.
        `gap` also compares the current log-probs with the engine's before anything is updated. Raises GapExceeded, and
        NonFinite when the loss or a gradient is not finite; the weights are then as before.
        """
        ddp, optimizer = self._training()
        part = batch if rows is None else batch.select(rows)
        if objective.looks_first:
            part = self._looked_at(part, temperature)
        stats = objective.prepare(part)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        names, further = objective.metric_names, []
        if auxiliary is not None:
            names, further = (*names, *auxiliary[1].metric_names), [self._add_gradients(*auxiliary)]
        walked = self._walk(part, stats.live_rows, Walk(temperature, objective, stats), training=True)
        if "proximal" in part.extras:
            mask = part.loss_mask & stats.live_rows[part.row_of_token]
            names, further = (
                (*names, *RATIO_METRICS),
                [*further, ratio_quantiles(walked.logprobs, part.extras["proximal"], mask)],
            )
        if self.model.watch is not None:
            names, further = (*names, *ROUTER_METRICS), [*further, self.model.watch.metrics()]
        walked = replace(walked, sums=torch.cat([walked.sums, *further]))
        metrics = self._report(part, stats.live_rows, walked, names, gap)
        step = optimizer.step()
        if step is None:
            raise NonFinite(f"update {optimizer.updates}: a gradient is not finite, the step was not made")
        faults.point("optimizer.mid")
        return {**metrics, "grad_norm": step.grad_norm, "lr": step.lr, "trained_rows": float(stats.live_rows.sum())}

    def _add_gradients(self, batch: TokenBatch, auxiliary: Auxiliary) -> Tensor:
        """Add the further loss's gradients to those of the step, before the step's own walk; sums of its metrics."""
        stats = auxiliary.objective.prepare(batch)
        walk = Walk(1.0, auxiliary.objective, stats, scale=auxiliary.coef, finalize=False)
        return self._walk(batch, stats.live_rows, walk, training=True).sums

    def evaluate_loss(self, batch: TokenBatch, objective: Objective, temperature: float = 1.0) -> dict[str, float]:
        """The objective's metrics on the whole batch, without a step."""
        if objective.looks_first:
            batch = self._looked_at(batch, temperature)
        stats = objective.prepare(batch)
        walked = self._walk(batch, stats.live_rows, Walk(temperature, objective, stats), training=False)
        return self._report(batch, stats.live_rows, walked, objective.metric_names, None)

    def logprobs(
        self, batch: TokenBatch, temperature: float, gap: GapLimit | None = None
    ) -> tuple[ray.ObjectRef, dict[str, float]]:
        """Reference to the log-probs float32 [N] of the batch's trained tokens (0 elsewhere), and the gap metrics."""
        rows = batch.trained_per_row > 0
        walked = self._walk(batch, rows, Walk(temperature), training=False)
        metrics = self._report(batch, rows, walked, (), gap)
        return ray.put(walked.logprobs.cpu()), metrics

    def values(self, batch: TokenBatch) -> ray.ObjectRef:
        """Reference to the score head's numbers float32 [N] at the places that predict the batch's trained tokens; 0 elsewhere."""
        walked = self._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False)
        return ray.put(walked.logprobs.cpu())

    def top_logprobs(self, batch: TokenBatch, asked: TopK) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """References to the likeliest tokens at the places of the batch's trained tokens, as a teacher tells them.

        Ids int32 [N, K] and log-probs float32 [N, K], likeliest first; 0 where not asked. Raises ValueError for a model with a
        score head.
        """
        ids, logprobs = top_of_batch(self.model, batch, asked, self._spec)
        return ray.put(ids.cpu()), ray.put(logprobs.cpu())

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of every token after the first of each row (weight-sync probes)."""
        batch = probe_batch(rows)
        walked = self._walk(batch, torch.ones(batch.rows, dtype=torch.bool), Walk(1.0), training=False)
        cuts = batch.cu_seqlens.tolist()
        values = walked.logprobs.tolist()
        return [values[a + 1 : b] for a, b in zip(cuts, cuts[1:], strict=False)]

    def _looked_at(self, batch: TokenBatch, temperature: float) -> TokenBatch:
        """The batch with `current` log-probs and `entropy` of its trained tokens, from a forward pass without gradient."""
        walked = self._walk(batch, batch.trained_per_row > 0, Walk(temperature, keep_entropy=True), training=False)
        return batch.with_extras(current=walked.logprobs.cpu(), entropy=walked.entropy.cpu())

    # -- one walk over micro-batches

    def _walk(self, batch: TokenBatch, rows: Tensor, walk: Walk, *, training: bool) -> Walked:
        """Run Megatron's schedule over the rows marked true."""
        micro_batches = plan_microbatches(
            batch,
            rows.nonzero()[:, 0].tolist(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            kind=self._spec.rows,
            token_budget=self._spec.micro_batch_tokens,
            together=walk.together(batch),
            pair_cost=attention_pair_cost(self.config),
            with_row_places=self._balances(walk, training),
        )
        names = walk.objective.metric_names if walk.objective is not None else ()
        device = runtime.device()
        flat = torch.zeros(batch.tokens.numel(), dtype=torch.float32, device=device)
        entropy = torch.zeros_like(flat) if walk.keep_entropy else flat.new_zeros(0)
        sums = torch.zeros(len(names), dtype=torch.float32, device=device)
        inputs = {} if walk.stats is None else {k: v.to(device) for k, v in walk.stats.values.items()}
        weights = flat if walk.stats is None else walk.stats.weights.to(device)
        candidates = None if walk.stats is None else walk.stats.candidates
        if candidates is not None:
            candidates = candidates.to(device)

        def forward(iterator: Iterator[MicroBatch], model: MegatronModel) -> tuple[Tensor, Reduce]:
            micro_batch = next(iterator).to(device, self.model.dtype)
            return model(micro_batch), partial(score, micro_batch)

        def score(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            index = micro_batch.source_index
            outputs = self._outputs(hidden, micro_batch, walk, None if candidates is None else candidates[index])
            flat[index] = outputs.logprobs.detach()
            if walk.keep_entropy and outputs.entropy is not None:
                entropy[index] = outputs.entropy.detach()
            loss = outputs.logprobs.sum() * 0.0
            if walk.objective is not None and walk.stats is not None:
                values = {name: value[index] for name, value in inputs.items()}
                part = walk.objective.loss(outputs, values, weights[index], walk.stats)
                sums.add_(torch.stack([part.metrics[name].float() for name in names]))
                loss = part.loss * walk.scale
            return loss, torch.zeros((), dtype=torch.int, device=device), None

        model = self._ddp if training and self._ddp else self.model
        with self._balanced(rows, walk, training):
            run_schedule(model, micro_batches, forward, training=training, finalize=walk.finalize)
        return Walked(*self._share(flat, entropy, sums))

    def _balances(self, walk: Walk, training: bool) -> bool:
        """Whether routers are balanced: in a step's own walk. The log-probs of others and further losses leave them alone."""
        return self.model.watch is not None and training and walk.finalize

    def _balanced(self, rows: Tensor, walk: Walk, training: bool) -> AbstractContextManager[None]:
        if self.model.watch is None or not self._balances(walk, training):
            return nullcontext()
        weight = 1.0 / max(1, int(rows.sum()))
        return self.model.watch.step(self._spec.router, weight, walk.scale, runtime.device())

    def _outputs(self, hidden: Tensor, micro_batch: MicroBatch, walk: Walk, candidates: Tensor | None) -> Outputs:
        """What the head says of the pass's tokens, and of further `candidates` [M, K] in their places."""
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
        if self.config.score_head:
            return Outputs(token_scores(hidden, self.model))
        if candidates is not None:
            targets = torch.cat([targets[:, None], candidates.long()], dim=1)
        out = token_logprobs(
            hidden,
            output_head(self.model),
            targets,
            temperature=walk.temperature,
            chunk_tokens=self._spec.logprob_chunk_tokens,
            want_entropy=walk.with_entropy,
            want_collision=walk.with_collision,
            want_log_norm=walk.with_log_norm,
        )
        if candidates is None:
            return Outputs(out.logprobs, out.entropy, out.collision, log_norm=out.log_norm)
        return Outputs(out.logprobs[:, 0], out.entropy, out.collision, out.logprobs[:, 1:], out.log_norm)

    def _share(self, *parts: Tensor) -> Sequence[Tensor]:
        """What the last stages computed, summed over data-parallel ranks, on every rank: one all-reduce."""
        whole = from_last_stages(torch.cat(parts))
        shared: Sequence[Tensor] = whole.split([part.numel() for part in parts])
        return shared

    def _report(
        self,
        batch: TokenBatch,
        rows: Tensor,
        walked: Walked,
        names: Sequence[str],
        gap: GapLimit | None,
    ) -> dict[str, float]:
        """Metrics as numbers: the one device-to-host copy of a step. Raises GapExceeded and NonFinite."""
        values = walked.sums
        if gap is not None:
            mask = batch.loss_mask & rows[batch.row_of_token] & (batch.version >= 0)
            values = torch.cat([values, rollout_gap(walked.logprobs, batch.behavior, mask)])
            names = (*names, *GAP_METRICS)
        metrics = dict(zip(names, values.tolist(), strict=True))
        if gap is not None and not metrics["gap/p99"] < gap.p99:
            raise GapExceeded({name: metrics[name] for name in GAP_METRICS}, gap)
        if metrics.get("loss", 0.0) != metrics.get("loss", 0.0):
            raise NonFinite("the loss is not a number; the step was not made")
        return metrics

    def _training(self) -> tuple[PolicyDdp, PolicyOptimizer]:
        if self._ddp is None or self._optimizer is None:
            raise RuntimeError("start_training must come before train_step")
        return self._ddp, self._optimizer

    # -- weights out and in

    def publish(self, version: int) -> SharedMemoryHandle | None:
        """Put every weight, in Hugging Face names, where an engine on rank 0's node can read it; rank 0 returns the handle."""
        tensors = self._store.weights()
        if dist.get_rank() != 0:
            for _ in tensors:
                pass
            return None
        return self._sender.publish(version, ((name, tensor) for name, tensor in tensors if tensor is not None))

    def withdraw(self) -> None:
        """Give back what `publish` holds."""
        self._sender.close()

    def save(self, folder: str, prefix: str = "") -> tuple[ShardFile, ...]:
        """Write this rank's share of `weights` (together a Hugging Face folder) and, in training, of `optimizer` under `folder`, with
        `prefix` before their names; returns its shards.
        """
        return self._store.save(Path(folder), self._optimizer, prefix)

    def begin_save(self, folder: str, prefix: str = "") -> None:
        """As `save`, but returns when this rank's share is copied; `saved` says when the copies are written."""
        self._background.begin(
            self._store.sections(self._optimizer, prefix), partial(self._write_copies, Path(folder), prefix)
        )

    def _write_copies(self, folder: Path, prefix: str, copies: Copies) -> tuple[ShardFile, ...]:
        self._store.write_beside(folder, self._optimizer, prefix)
        return tuple(shard for section, shares in copies.items() for shard in write_section(folder, section, shares))

    async def saved(self) -> tuple[ShardFile, ...]:
        """This rank's shards of the save that began last, once they are on the disk. Not collective; other calls may run meanwhile."""
        return await asyncio.wrap_future(self._background.written())

    def close(self) -> None:
        """Wait for a save that is being written."""
        self._background.close()

    def load(self, folder: str, updates: int | None, prefix: str = "") -> None:
        """Load `weights` of a checkpoint; with `updates`, also the optimizer state after that many steps."""
        self._store.load_weights(Path(folder), prefix)
        if self._optimizer is not None:
            self._optimizer.reload_main_params()
            if updates is not None:
                self._store.load_optimizer(Path(folder) / f"{prefix}optimizer", self._optimizer, updates)


def probe_batch(rows: Sequence[Sequence[int]]) -> TokenBatch:
    """Rows of plain token ids in which every token after the first is scored."""
    lengths = torch.tensor([len(row) for row in rows])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(cu[-1])
    mask = torch.ones(count, dtype=torch.bool)
    mask[cu[:-1]] = False
    ids = torch.arange(len(rows))
    return TokenBatch(
        tokens=torch.tensor([t for row in rows for t in row]),
        cu_seqlens=cu,
        prompt_lens=torch.ones(len(rows), dtype=torch.int64),
        loss_mask=mask,
        behavior=torch.zeros(count),
        version=torch.full((count,), -1, dtype=torch.int32),
        prompt_id=ids,
        group_id=ids,
        episode_id=ids,
        valid=torch.ones(len(rows), dtype=torch.bool),
    )
