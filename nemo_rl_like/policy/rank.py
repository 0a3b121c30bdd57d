"""`PolicyRank`: one rank's part of the trainable model, hosted in a worker group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.algorithms.objectives import Auxiliary, Objective
from nemo_rl_like.artifacts import faults
from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.model import runtime
from nemo_rl_like.model.dropout import token_keys
from nemo_rl_like.model.layouts import MicroBatch, Passes, plan_microbatches
from nemo_rl_like.model.router import ENGINE_DIFFERS, ROUTER_METRICS
from nemo_rl_like.model.virtual_tokens import behind, of_batch
from nemo_rl_like.policy.backend import DTYPES, Backend, ModelRequest
from nemo_rl_like.policy.background import BackgroundSave
from nemo_rl_like.policy.gap import GAP_METRICS, RATIO_METRICS, GapExceeded, GapLimit, ratio_quantiles, rollout_gap
from nemo_rl_like.policy.probe_rows import probe_batch
from nemo_rl_like.policy.store import write_section
from nemo_rl_like.policy.top import TopK, top_of_batch
from nemo_rl_like.policy.walk import Walk, Walked
from nemo_rl_like.spec.optimizer import OptimizerSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tensors.packed import Packed
from nemo_rl_like.tensors.shards import ShardFile
from nemo_rl_like.tokens.batch import TokenBatch
from nemo_rl_like.tokens.routes import ROUTES
from nemo_rl_like.weights.network import Offer, WeightServer
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle, SharedMemorySender

logger = logging.getLogger(__name__)


class NonFinite(NrlError):
    """The loss or a gradient is not finite; the step was not made."""


class PolicyRank:
    """One rank of a policy: what its steps are, over the backend that computes them.

    Args: `context` from the worker group, with axes pp, dp, cp, tp; `folder`, a Hugging Face folder (with weights, unless
    `initialize` gives the seed of a model from scratch); `policy` and `dtype` from the spec; `score_head` puts a head of one
    number a token on a folder that has none (a critic or reward model), zero at first or drawn with `score_head_seed`; with `adapter_seed`
    the adapters of `policy.lora` or `policy.adapter` are put on it and trained alone; `on_host` keeps the weights in host memory but for passes;
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
        on_host: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._spec = policy
        self._adapter_seed = adapter_seed
        # A model with a score head is not the one whose choices a batch has.
        self._replays = policy.router.replay != "none" and not score_head
        request = ModelRequest(
            Path(folder), DTYPES[dtype], initialize, score_head, score_head_seed, adapter_seed, on_host, timeout_s
        )
        self.backend = _backend(context, policy, request)
        self._background = BackgroundSave()
        self._sender = SharedMemorySender()
        self._server = WeightServer()
        self._address = context.master_addr

    @property
    def model(self) -> torch.nn.Module:
        """This rank's part of the model, for services that are hosted beside it."""
        return self.backend.model

    # -- training

    def start_training(self, optimizer: OptimizerSpec, total_updates: int) -> None:
        """Wrap the model for gradients and make the optimizer; `total_updates` optimizer steps span the schedule."""
        self.backend.start_training(optimizer, total_updates)

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
        self.backend.zero_grad()
        part = batch if rows is None else batch.select(rows)
        if objective.looks_first:
            part = self._looked_at(part, temperature)
        stats = objective.prepare(part)
        names, further = objective.metric_names, []
        if auxiliary is not None:
            names, further = (*names, *auxiliary[1].metric_names), [self._add_gradients(*auxiliary)]
        walk = Walk(temperature, objective, stats)
        walked = self._walk(part, stats.live_rows, walk, training=True, replay=self._replays)
        if "proximal" in part.extras:
            mask = part.loss_mask & stats.live_rows[part.row_of_token]
            names, further = (
                (*names, *RATIO_METRICS),
                [*further, ratio_quantiles(walked.logprobs, part.extras["proximal"], mask)],
            )
        if self.backend.watch is not None:
            names, further = (*names, *ROUTER_METRICS), [*further, self.backend.watch.metrics()]
            if self._of_engine and "proximal" not in part.extras:  # otherwise the pass before told it
                names, further = (*names, ENGINE_DIFFERS), [*further, self.backend.watch.routes.differing()]
        walked = replace(walked, sums=torch.cat([walked.sums, *further]))
        undropped = None
        if gap is not None and self._drops:  # the engine has no dropout
            undropped = self._walk(part, stats.live_rows, Walk(temperature), training=False).logprobs
        metrics = self._report(part, stats.live_rows, walked, names, gap, undropped)
        step = self.backend.step()
        if step is None:
            raise NonFinite(f"update {self.backend.updates}: a gradient is not finite, the step was not made")
        if self.backend.watch is not None:
            self.backend.watch.move_biases(self._spec.router.bias_update_rate)
        faults.point("optimizer.mid")
        trained = {"grad_norm": step.grad_norm, "lr": step.lr, "trained_rows": float(stats.live_rows.sum())}
        return {**metrics, **trained, **walked.passes}

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

    def logprobs_and_routes(
        self, batch: TokenBatch, temperature: float, gap: GapLimit | None = None
    ) -> tuple[ray.ObjectRef, ray.ObjectRef, dict[str, float]]:
        """As `logprobs`, and between them a reference to the experts that the tokens were sent to; see `model.routes.ROUTES`."""
        if self.backend.watch is None:
            raise ValueError("the model has no experts")
        rows = batch.trained_per_row > 0
        with self.backend.watch.routes.recording(batch.tokens.numel(), runtime.device()) as routes:
            walked = self._walk(batch, rows, Walk(temperature), training=False, replay=self._of_engine, record=True)
        names: tuple[str, ...] = ()
        if self._of_engine:
            names = (ENGINE_DIFFERS,)
            walked = replace(walked, sums=self.backend.watch.routes.differing())
        metrics = self._report(batch, rows, walked, names, gap)
        return ray.put(walked.logprobs.cpu()), ray.put(routes.cpu()), metrics

    @property
    def _of_engine(self) -> bool:
        """Whether tokens go where the engine sent them."""
        return self._replays and self._spec.router.replay == "engine"

    def values(self, batch: TokenBatch) -> ray.ObjectRef:
        """Reference to the score head's numbers float32 [N] at the places that predict the batch's trained tokens; 0 elsewhere."""
        walked = self._walk(batch, batch.trained_per_row > 0, Walk(1.0), training=False)
        return ray.put(walked.logprobs.cpu())

    def top_logprobs(self, batch: TokenBatch, asked: TopK) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """References to the likeliest tokens at the places of the batch's trained tokens, as a teacher tells them.

        Ids int32 [N, K] and log-probs float32 [N, K], likeliest first; 0 where not asked. Raises ValueError for a model with a
        score head.
        """
        ids, logprobs = top_of_batch(self.backend, batch, asked, self._spec)
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
        walk = Walk(temperature, keep_entropy=True)
        walked = self._walk(batch, batch.trained_per_row > 0, walk, training=False, replay=self._replays)
        return batch.with_extras(current=walked.logprobs.cpu(), entropy=walked.entropy.cpu())

    # -- one walk over micro-batches

    def _walk(
        self,
        batch: TokenBatch,
        rows: Tensor,
        walk: Walk,
        *,
        training: bool,
        replay: bool = False,
        record: bool = False,
    ) -> Walked:
        """Pass the rows marked true through the model; with `replay` tokens go to the experts that the batch has for them, and with `record`
        routers tell theirs."""
        routes = batch.extras.get(ROUTES) if replay else None
        with_row_places = self._balances(walk, training) or record or routes is not None
        passes = self._passes(batch, rows, walk, training, with_row_places)
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

        def score(micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
            index = micro_batch.source_index
            further = None if candidates is None else candidates[index]
            outputs = self.backend.outputs(hidden, micro_batch, walk, further)
            flat[index] = outputs.logprobs.detach()
            if walk.keep_entropy and outputs.entropy is not None:
                entropy[index] = outputs.entropy.detach()
            if walk.objective is None or walk.stats is None:
                return outputs.logprobs.sum() * 0.0
            values = {name: value[index] for name, value in inputs.items()}
            part = walk.objective.loss(outputs, values, weights[index], walk.stats)
            sums.add_(torch.stack([part.metrics[name].float() for name in names]))
            return part.loss * walk.scale

        with self._balanced(rows, walk, training), self._replayed(routes):
            self.backend.run(passes, score, training=training, finalize=walk.finalize)
        whole = self.backend.share(torch.cat([flat, entropy, sums]))
        logprobs, entropy, sums = whole.split([flat.numel(), entropy.numel(), sums.numel()])
        return Walked(logprobs, entropy, sums, passes.metrics)

    def _passes(self, batch: TokenBatch, rows: Tensor, walk: Walk, training: bool, with_row_places: bool) -> Passes:
        """This rank's passes over the rows, behind the model's virtual tokens."""
        dp_size, dp_rank = self.backend.replicas
        virtual = self.backend.virtual_tokens
        passes = plan_microbatches(
            behind(batch, virtual) if virtual else batch,
            rows.nonzero()[:, 0].tolist(),
            dp_size=dp_size,
            dp_rank=dp_rank,
            kind=self._spec.rows,
            token_budget=self._spec.micro_batch_tokens,
            together=walk.together(batch),
            pair_cost=self.backend.pair_cost,
            with_row_places=with_row_places,
            token_keys=self._token_keys(batch, walk) if training else None,
        )
        return of_batch(passes, batch, len(virtual)) if virtual else passes

    @property
    def _drops(self) -> bool:
        """Whether training passes have dropout."""
        return self._adapter_seed is not None and self._spec.lora is not None and self._spec.lora.dropout > 0

    def _token_keys(self, batch: TokenBatch, walk: Walk) -> Tensor | None:
        """What the dropout of this update's walk draws from, if there is any."""
        if not self._drops or self._adapter_seed is None:
            return None
        return token_keys(batch, self._adapter_seed, self.backend.updates, int(walk.finalize))

    def _balances(self, walk: Walk, training: bool) -> bool:
        """Whether routers are balanced: in a step's own walk. The log-probs of others and further losses leave them alone."""
        return self.backend.watch is not None and training and walk.finalize

    def _balanced(self, rows: Tensor, walk: Walk, training: bool) -> AbstractContextManager[None]:
        if self.backend.watch is None or not self._balances(walk, training):
            return nullcontext()
        weight = 1.0 / max(1, int(rows.sum()))
        return self.backend.watch.step(self._spec.router, weight, walk.scale, runtime.device())

    def _replayed(self, routes: Tensor | None) -> AbstractContextManager[None]:
        if self.backend.watch is None or routes is None:
            return nullcontext()
        return self.backend.watch.routes.replaying(routes, runtime.device())

    def _report(
        self,
        batch: TokenBatch,
        rows: Tensor,
        walked: Walked,
        names: Sequence[str],
        gap: GapLimit | None,
        undropped: Tensor | None = None,
    ) -> dict[str, float]:
        """Metrics as numbers: the one device-to-host copy of a step; the gap is that of `undropped`, if given. Raises GapExceeded and NonFinite."""
        values = walked.sums
        if gap is not None:
            mask = batch.loss_mask & rows[batch.row_of_token] & (batch.version >= 0)
            logprobs = walked.logprobs if undropped is None else undropped
            values = torch.cat([values, rollout_gap(logprobs, batch.behavior, mask)])
            names = (*names, *GAP_METRICS)
        metrics = dict(zip(names, values.tolist(), strict=True))
        if gap is not None and not metrics["gap/p99"] < gap.p99:
            raise GapExceeded({name: metrics[name] for name in GAP_METRICS}, gap)
        if metrics.get("loss", 0.0) != metrics.get("loss", 0.0):
            raise NonFinite("the loss is not a number; the step was not made")
        return metrics

    # -- weights out and in

    def publish(self, version: int) -> SharedMemoryHandle | None:
        """Put every weight, in Hugging Face names, where an engine on rank 0's node can read it; rank 0 returns the handle."""
        tensors = self.backend.weights()
        if dist.get_rank() != 0:
            for _ in tensors:
                pass
            return None
        return self._sender.publish(version, ((name, tensor) for name, tensor in tensors if tensor is not None))

    def offer(self, handle: SharedMemoryHandle) -> Offer | None:
        """Serve what `publish` holds to other hosts; rank 0 returns the offer."""
        return self._server.offer(handle, self._address) if dist.get_rank() == 0 else None

    def withdraw(self) -> None:
        """Give back what `publish` holds, and end its offer."""
        self._server.close()
        self._sender.close()

    def save(self, folder: str, prefix: str = "") -> tuple[ShardFile, ...]:
        """Write this rank's share of `weights` (together a Hugging Face folder) and, in training, of `optimizer` under `folder`, with
        `prefix` before their names; returns its shards.
        """
        return self._write(Path(folder), prefix, self.backend.sections(prefix))

    def begin_save(self, folder: str, prefix: str = "") -> None:
        """As `save`, but returns when this rank's share is copied; `saved` says when the copies are written."""
        self._background.begin(self.backend.sections(prefix), partial(self._write, Path(folder), prefix))

    def _write(
        self, folder: Path, prefix: str, sections: Iterable[tuple[str, Iterable[Packed]]]
    ) -> tuple[ShardFile, ...]:
        self.backend.write_beside(folder, prefix)
        return tuple(shard for section, shares in sections for shard in write_section(folder, section, shares))

    async def saved(self) -> tuple[ShardFile, ...]:
        """This rank's shards of the save that began last, once they are on the disk. Not collective; other calls may run meanwhile."""
        return await asyncio.wrap_future(self._background.written())

    def close(self) -> None:
        """Wait for a save that is being written."""
        self._background.close()

    def load(self, folder: str, updates: int | None, prefix: str = "") -> None:
        """Load `weights` of a checkpoint; with `updates`, also the optimizer state after that many steps."""
        self.backend.load(Path(folder), updates, prefix)


def _backend(context: RankContext, policy: PolicySpec, request: ModelRequest) -> Backend:
    """The backend that the spec names; each loads its own packages when it is asked for."""
    if policy.backend == "fsdp":
        from nemo_rl_like.policy.fsdp import FsdpBackend

        return FsdpBackend(context, policy, request)
    from nemo_rl_like.policy.megatron import MegatronBackend

    return MegatronBackend(context, policy, request)
