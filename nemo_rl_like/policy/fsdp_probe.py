"""Does transformers compute this model as the policy needs it? Asked of the model itself, on a few tokens, when it is loaded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.heads import full_logits
from nemo_rl_like.model.layouts import Kind, plan_microbatches
from nemo_rl_like.model.transformers_model import TransformersModel
from nemo_rl_like.policy.backend import ModelRequest
from nemo_rl_like.policy.probe_rows import probe_batch
from nemo_rl_like.tokens.batch import TokenBatch

_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest difference of two ways to one log-prob, in nats."""
_PROMPT = 3
_ROWS = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 6, 5, 4))
"""Two answers to one prompt, in sevenths of the vocabulary."""


@torch.no_grad()
def check_outputs(model: TransformersModel, kind: Kind, request: ModelRequest) -> None:
    """Raise InputError unless the output head is a product with one matrix, and rows of `kind` are as if each were alone. Collective."""
    if kind == "shared_prefix" and model.windowed:
        raise InputError(
            f"`policy.rows` is shared_prefix, and {type(model.hf).__name__} has layers that attend within a window; set `policy.rows: packed`"
        )
    batch = _batch(model)
    limit = _LIMITS[request.dtype]
    alone = _logprobs(model, batch, "padded")
    gap = float((alone - _own_logprobs(model, batch)).abs().max())
    if not gap <= limit:
        raise InputError(
            f"{request.folder}: {type(model.hf).__name__} ends in more than a product with its output matrix (log-probs are {gap:.3g} nats "
            "apart), which `policy.backend: fsdp` does not compute; use `policy.backend: megatron`, or another model"
        )
    gap = 0.0 if kind == "padded" else float((alone - _logprobs(model, batch, kind)).abs().max())
    if not gap <= limit:
        raise InputError(
            f"`policy.rows` is {kind}, and {type(model.hf).__name__} lets rows see each other in it (log-probs are {gap:.3g} nats apart); "
            "set `policy.rows: padded`"
        )
    if isinstance(model, FSDPModule):
        model.reshard()


def _batch(model: TransformersModel) -> TokenBatch:
    """Two answers to one prompt, every token after the first scored."""
    vocabulary = model.hf.config.vocab_size
    batch = probe_batch([[place * vocabulary // 7 for place in row] for row in _ROWS])
    same = torch.zeros_like(batch.prompt_id)
    return replace(batch, prompt_id=same, prompt_lens=torch.full_like(batch.prompt_lens, _PROMPT))


def _logprobs(model: TransformersModel, batch: TokenBatch, kind: Kind) -> Tensor:
    """float32 [N] log-probs of the scored tokens as the policy computes them, 0 elsewhere."""
    (micro_batch,) = plan_microbatches(
        batch, range(batch.rows), dp_size=1, dp_rank=0, kind=kind, token_budget=batch.tokens.numel()
    )
    moved = micro_batch.to(runtime.device(), torch.float32)
    flat = torch.zeros(batch.tokens.numel(), device=runtime.device())

    def logprobs() -> Tensor:
        table = (full_logits(model.hidden(moved), model.head()) * model.logit_scale).log_softmax(dim=1)
        return table.gather(1, moved.targets[:, None])[:, 0]

    flat[moved.source_index] = model(logprobs)
    return flat


def _own_logprobs(model: TransformersModel, batch: TokenBatch) -> Tensor:
    """The same from the model's own logits."""
    rows = batch.tokens.view(batch.rows, -1).to(runtime.device())

    def logprobs() -> Tensor:
        table = model.logits(rows)[:, :-1].log_softmax(dim=2)
        return table.gather(2, rows[:, 1:, None])[:, :, 0]

    found: Tensor = torch.nn.functional.pad(model(logprobs), (1, 0))
    return found.flatten()
