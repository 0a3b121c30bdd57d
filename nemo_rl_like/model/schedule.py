"""Megatron's schedules over micro-batches of different lengths: one stage, a pipeline, or an interleaved pipeline.

Megatron can tell a neighbour the shape of each message before the message. It does so in a round of its own, and in an interleaved schedule
neighbours do not always make the same rounds: two ranks then wait for each other, or take one message for another. Here all messages of a run are as
long as its longest micro-batch, so that none needs a shape, and stages cut off what is too much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.layouts import MicroBatch, empty_pass
from nemo_rl_like.model.mcore import get_forward_backward_func, parallel_state

Reduce: TypeAlias = Callable[..., object]
"""What the schedule calls with the last stage's output."""
ForwardStep: TypeAlias = Callable[..., tuple[Tensor, Reduce]]


def run_stages(
    model: MegatronModel,
    micro_batches: Sequence[MicroBatch],
    forward: ForwardStep,
    *,
    training: bool,
    wrapped: Sequence[nn.Module] | None = None,
    **further: Any,
) -> None:
    """Run Megatron's schedule for this layout over the micro-batches, with gradients if `training`; `further` settings are the schedule's.

    `wrapped`: the model's stages in DDP. The model's configuration says what becomes of the gradients.
    """
    passes, ranks = list(micro_batches), parallel_state.get_pipeline_model_parallel_world_size()
    if (
        len(model.stages) > 1
    ):  # an interleaved schedule goes round all ranks with as many micro-batches as there are ranks
        passes += [empty_pass(passes[0].kind)] * (-len(passes) % ranks)
    longest = max(model.first.places(each.input_ids.shape) for each in passes)
    with torch.set_grad_enabled(training), model.messages_of(longest):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(passes) for _ in model.stages],
            model=list(wrapped or model.stages),
            num_microbatches=len(passes),
            seq_length=longest * _divided_by(model),
            micro_batch_size=1,
            forward_only=not training,
            **further,
        )


def _divided_by(model: MegatronModel) -> int:
    """What Megatron divides a sequence's length by to get that of a message."""
    shared: int = parallel_state.get_context_parallel_world_size()
    if model.config.sequence_parallel:
        shared *= model.config.tensor_model_parallel_size
    return shared
