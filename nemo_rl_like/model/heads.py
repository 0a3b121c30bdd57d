"""What hidden states end in. The output head over the vocabulary: log-probs, entropies and collisions of scored tokens, never all logits at once.

The vocabulary is cut over the tensor-parallel ranks; one small all-gather makes the normaliser. Math is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from nemo_rl_like.model.activations import KEPT_EXPONENTIALS
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.gradients import gradient_buffer
from nemo_rl_like.model.mcore import parallel_state

_TARGETS = 3
"""Column of the first target's logit in the statistics of a token; before it stand those of the whole vocabulary."""

_CACHE_ROWS = 64
"""Tokens whose logits pass through all elementwise steps before the next ones', so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """This rank's rows of the output matrix."""

    weight: Tensor
    """[V / tp, H], a parameter; the input embedding when tied."""
    vocab_size: int
    """Tokens without padding; padded rows never get any probability."""
    tp_group: dist.ProcessGroup | None = None
    """Ranks that hold the other rows; None: this rank holds all."""
    cap: float | None = None
    """Logits z become cap tanh(z / cap) (Gemma 2, arXiv 2408.00118, sec. 2); None: they stay."""

    @property
    def tp_size(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.tp_group is None else self.tp_group.size()

    @property
    def first_token(self) -> int:
        """Token id of this rank's first row."""
        return 0 if self.tp_group is None else self.tp_group.rank() * self.weight.shape[0]

    @property
    def real_rows(self) -> int:
        """Rows of this rank that are not padding."""
        return min(max(self.vocab_size - self.first_token, 0), self.weight.shape[0])


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the head says about M scored tokens, in nats."""

    logprobs: Tensor
    """float32, the shape of the targets: log-softmax(logits / temperature) at each, over the whole vocabulary."""
    entropy: Tensor | None
    """float32 [M] entropy of that distribution, if asked for."""
    collision: Tensor | None
    """float32 [M] log sum_v p(v)^2 of it, without gradient, if asked for."""
    log_norm: Tensor | None = None
    """float32 [M] logsumexp(logits / temperature), if asked for."""


def output_head(model: MegatronModel) -> OutputHead:
    """The head of a model's last pipeline stage. Raises ValueError on another stage, and for a model with a score head."""
    if not model.has_head or model.shape.score_head:
        raise ValueError("only the last pipeline stage of a language model has the output head")
    stage = model.last
    tied = stage.share_embeddings_and_output_weights
    weight = stage.shared_embedding_or_output_weight() if tied else stage.output_layer.weight
    group = parallel_state.get_tensor_model_parallel_group()
    return OutputHead(weight, model.shape.vocab_size, group if group.size() > 1 else None, model.shape.logit_cap)


def token_logprobs(
    hidden: Tensor,
    head: OutputHead,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    want_entropy: bool = False,
    want_collision: bool = False,
    want_log_norm: bool = False,
) -> TokenOutputs:
    """Log-probs of `targets` [M], or of K tokens a place [M, K], from `hidden` [M, H], differentiable in it and the head's weight.

    log p(y) = z_y - logsumexp(z), entropy = logsumexp(z) - sum_v p_v z_v, and collision = logsumexp(2 z) - 2 logsumexp(z), with
    z = hidden @ weight.T / temperature, capped before the division if the head has a cap.
    The logits of at most `chunk_tokens` tokens exist at once; the backward computes them again, but for the last chunks', whose
    exponentials are kept: one chunk's, or as many as 512 MiB hold; none with a cap. The weight's gradient goes to DDP's buffer where there is one
    (`model.gradients`). Collective over the head's tensor-parallel ranks, which hold the same `hidden` and `targets`, and so does its
    backward. Raises ValueError if `temperature` or `chunk_tokens` is not positive.
    """
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"temperature is {temperature} and chunk_tokens {chunk_tokens}; both must be positive")
    ids = targets[:, None] if targets.dim() == 1 else targets
    wanted = _Wanted(want_entropy, want_collision, want_log_norm)
    logprobs, entropy, collision, log_norm = _TokenLogprobs.apply(
        hidden, head.weight, ids, head, temperature, chunk_tokens, wanted, torch.is_grad_enabled()
    )
    return TokenOutputs(logprobs.view(targets.shape), entropy, collision, log_norm)


def token_scores(hidden: Tensor, model: MegatronModel) -> Tensor:
    """float32 [M] the score head's number at each of `hidden` [M, H]; the same on every tensor-parallel rank. Differentiable.

    Raises ValueError if the model has no score head on this pipeline stage.
    """
    if not (model.shape.score_head and model.has_head):
        raise ValueError("only the last pipeline stage of a model with a score head gives scores")
    return functional.linear(hidden.float(), model.last.score.weight.float())[:, 0]


def full_logits(hidden: Tensor, head: OutputHead) -> Tensor:
    """float32 [M, vocab_size] logits on every tensor-parallel rank, without gradient; for decoding and checks of few tokens."""
    with torch.no_grad():
        local = scaled_logits(hidden, head.weight, 1.0, head.cap)
        if head.tp_group is None:
            return local[:, : head.vocab_size]
        shards = [torch.empty_like(local) for _ in range(head.tp_size)]
        dist.all_gather(shards, local.contiguous(), group=head.tp_group)
        return torch.cat(shards, dim=1)[:, : head.vocab_size]


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, cap: float | None = None) -> Tensor:
    """float32 [c, V] hidden @ weight.T, capped if there is a cap, / temperature of `hidden` [c, H] and `weight` [V, H], a new tensor."""
    if cap is not None:
        return (hidden @ weight.t()).float().div_(cap).tanh_().mul_(cap / temperature)
    if hidden.dtype == torch.float32:
        return (hidden if temperature == 1.0 else hidden / temperature) @ weight.t()
    return (hidden @ weight.t()).float().div_(temperature)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is computed beside log-probs."""

    entropy: bool
    collision: bool
    log_norm: bool


class _TokenLogprobs(torch.autograd.Function):
    """With p the softmax, g_k, e and l the gradients of K log-probs, entropy H and log-normaliser, and g the sum of g_k, the gradient
    of logit v is sum of g_k (v = target k) - p_v (g - l + e H) - e p_v log p_v. That of what a cap made of it is times 1 - (z_v / cap)^2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: OutputHead,
        temperature: float,
        chunk_tokens: int,
        wanted: _Wanted,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        shard = _Shard(weight, head.first_token, head.real_rows, temperature, head.cap)
        chunks = _chunks(hidden.shape[0], chunk_tokens)
        keeps = with_grad and head.cap is None  # the slope of a cap is not to be had from exponentials that are 0
        keep_from = len(chunks) - (_kept_chunks(chunk_tokens, head.real_rows) if keeps else 0)
        kept: list[_Exponentials | None] = []
        stats = [hidden.new_zeros(0, _TARGETS + targets.shape[1], dtype=torch.float32)]
        for i, part in enumerate(chunks):
            exponentials, stat = shard.statistics(hidden[part], targets[part], wanted)
            kept.append(exponentials if i >= keep_from else None)
            stats.append(stat)
        log_norm, mean_logit, log_squares, target_logits = _over_vocabulary(torch.cat(stats), head)
        entropy = log_norm - mean_logit if wanted.entropy else None
        collision = log_squares - 2 * log_norm if wanted.collision else None
        if collision is not None:
            ctx.mark_non_differentiable(collision)
        ctx.save_for_backward(hidden, weight, targets, log_norm, log_norm - mean_logit)
        ctx.shard, ctx.chunks, ctx.kept, ctx.group = shard, chunks, kept, head.tp_group
        ctx.set_materialize_grads(False)
        return target_logits - log_norm[:, None], entropy, collision, log_norm.clone() if wanted.log_norm else None

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        _: Tensor | None,
        grad_log_norm: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None]:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        buffer = gradient_buffer(weight)
        grad_weight = buffer
        if grad_weight is None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(targets, dtype=torch.float32)
        grad_softmax = grad_logprobs.sum(dim=1)
        if grad_log_norm is not None:
            grad_softmax = grad_softmax - grad_log_norm
        for i, part in reversed(list(enumerate(ctx.chunks))):
            chunk = _Chunk(hidden[part], targets[part], log_norm[part], entropy[part])
            grads = _Gradients(
                grad_logprobs[part], grad_softmax[part], None if grad_entropy is None else grad_entropy[part]
            )
            kept, ctx.kept[i] = ctx.kept[i], None
            shard.backward(chunk, kept, grads, grad_hidden[part], grad_weight)
        if ctx.group is not None and hidden.shape[0]:
            dist.all_reduce(grad_hidden, group=ctx.group)
        to_weight = None if grad_weight is buffer or grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden.to(hidden.dtype), to_weight, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Exponentials:
    """Unnormalised probabilities of one chunk on this rank."""

    values: Tensor
    """float32 [c, V] exp(logit - maximum)"""
    maximum: Tensor
    """float32 [c]"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Saved values of one chunk's c tokens."""

    hidden: Tensor
    targets: Tensor
    """[c, K]"""
    log_norm: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Of one chunk's outputs."""

    targets: Tensor
    """[c, K] of the log-probs."""
    softmax: Tensor
    """[c] what multiplies -p: the sum of those, less the log-normaliser's."""
    entropy: Tensor | None
    """[c]"""


@dataclass(frozen=True, slots=True)
class _Shard:
    """This rank's part of the head."""

    weight: Tensor
    first_token: int
    real_rows: int
    temperature: float
    cap: float | None = None

    def statistics(self, hidden: Tensor, targets: Tensor, wanted: _Wanted) -> tuple[_Exponentials | None, Tensor]:
        """float32 [c, 3 + K] over this rank's tokens: logsumexp; if wanted mean logit, and logsumexp of twice the logits; the targets'
        logits (0 if not here)."""
        out = hidden.new_zeros(hidden.shape[0], _TARGETS + targets.shape[1], dtype=torch.float32)
        if self.real_rows == 0:
            out[:, 0] = out[:, 2] = float("-inf")
            return None, out
        logits = self._logits(hidden)
        here, row = self._local(targets)
        out[:, _TARGETS:] = logits.gather(1, row) * here
        maximum = logits.new_empty(logits.shape[0])
        for start in range(0, logits.shape[0], _CACHE_ROWS):
            block = slice(start, start + _CACHE_ROWS)
            maximum[block] = _exponentiate(logits[block], out[block], wanted)
        return _Exponentials(logits, maximum), out

    def backward(
        self,
        chunk: _Chunk,
        kept: _Exponentials | None,
        grads: _Gradients,
        grad_hidden: Tensor,
        grad_weight: Tensor | None,
    ) -> None:
        """Add this rank's part of the gradients to `grad_hidden` [c, H] and `grad_weight` [V / tp, H]."""
        if self.real_rows == 0:
            return
        here, row = self._local(chunk.targets)
        at_targets = grads.targets * here
        logits = self._logits(chunk.hidden) if kept is None else kept.values
        slope = None if self.cap is None else 1 - (logits * (self.temperature / self.cap)).square_()
        matrix, scale = self._softmax_part(logits, chunk, kept, grads.softmax, grads.entropy)
        if slope is not None:
            matrix, at_targets = matrix.mul_(slope), at_targets * slope.gather(1, row)
        weight = self.weight[: self.real_rows]
        lone = row.shape[1] == 1
        if lone:
            grad_hidden.addcmul_(weight[row[:, 0]].float(), at_targets)
        else:  # the targets' part goes into the matrix
            matrix, scale = matrix.mul_(scale).scatter_add_(1, row, -at_targets), torch.ones_like(scale)
        grad_hidden.sub_((matrix.to(weight.dtype) @ weight).float().mul_(scale))
        grad_hidden.div_(self.temperature)
        if grad_weight is None:
            return
        hidden = chunk.hidden.float() / self.temperature
        if lone:
            grad_weight.index_add_(0, row[:, 0], hidden * at_targets)
        scaled = hidden.mul_(scale)
        if weight.dtype == torch.float32:
            grad_weight[: self.real_rows].addmm_(matrix.t(), scaled, alpha=-1)
        else:
            grad_weight[: self.real_rows].sub_(matrix.to(weight.dtype).t() @ scaled.to(weight.dtype))

    def _softmax_part(
        self,
        matrix: Tensor,
        chunk: _Chunk,
        kept: _Exponentials | None,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """[c, V] matrix and [c, 1] row scale whose product is p (g + e H) + e p log p; `matrix` are the kept exponentials, else logits."""
        if kept is None:
            matrix, scale = matrix.sub_(chunk.log_norm[:, None]).exp_(), grad_logprobs[:, None]
        else:
            scale = (grad_logprobs * (kept.maximum - chunk.log_norm).exp())[:, None]
        if grad_entropy is None:
            return matrix, scale
        probability = matrix if kept is None else matrix * (kept.maximum - chunk.log_norm).exp()[:, None]
        surprise = torch.xlogy(probability, probability).mul_(grad_entropy[:, None])
        return surprise.addcmul_(probability, (grad_logprobs + grad_entropy * chunk.entropy)[:, None]), torch.ones_like(
            scale
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 [c, V] (capped) logits / temperature of this rank's tokens, a new tensor."""
        return scaled_logits(hidden, self.weight[: self.real_rows], self.temperature, self.cap)

    def _local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each target is on this rank, and its row here (some row where it is not)."""
        row = targets - self.first_token
        here = (row >= 0) & (row < self.real_rows)
        return here, row.clamp(0, self.real_rows - 1)


def _exponentiate(logits: Tensor, out: Tensor, wanted: _Wanted) -> Tensor:
    """exp(logit - maximum) in place of `logits` [r, V]; fills the first columns of `out` as `_Shard.statistics` says; maximum [r]."""
    maximum = logits.amax(dim=1)
    below = logits - maximum[:, None] if wanted.entropy else logits.sub_(maximum[:, None])
    total = torch.exp(below, out=logits).sum(dim=1)
    out[:, 0] = maximum + total.log()
    if wanted.entropy:
        out[:, 1] = maximum + torch.linalg.vecdot(logits, below) / total
    if wanted.collision:
        out[:, 2] = 2 * maximum + torch.linalg.vecdot(logits, logits).log()
    return maximum


def _over_vocabulary(stats: Tensor, head: OutputHead) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[M, 3 + K] of each rank -> `_Shard.statistics` over the whole vocabulary, float32 [M] thrice and [M, K]."""
    if head.tp_group is None or stats.shape[0] == 0:
        return stats[:, 0], stats[:, 1], stats[:, 2], stats[:, _TARGETS:]
    shards = [torch.empty_like(stats) for _ in range(head.tp_size)]
    dist.all_gather(shards, stats, group=head.tp_group)
    parts = torch.stack(shards)
    log_norm = parts[..., 0].logsumexp(dim=0)
    share = (parts[..., 0] - log_norm).exp()
    means, targets = (share * parts[..., 1]).sum(dim=0), parts[..., _TARGETS:].sum(dim=0)
    return log_norm, means, parts[..., 2].logsumexp(dim=0), targets


def _kept_chunks(chunk_tokens: int, vocabulary: int) -> int:
    """Chunks of `chunk_tokens` tokens whose exponentials are kept."""
    return max(1, KEPT_EXPONENTIALS // (chunk_tokens * max(1, vocabulary) * 4))


def _chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    """Slices of at most `chunk_tokens`; the short one is first, so that the last ones, which are kept, are full."""
    cuts = [0, *range(tokens % chunk_tokens or chunk_tokens, tokens + 1, chunk_tokens)] if tokens else []
    return [slice(start, stop) for start, stop in pairwise(cuts)]
