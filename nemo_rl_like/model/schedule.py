"""Megatron's schedules over micro-batches of different lengths: one stage, a pipeline, or an interleaved pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nemo_rl_like.model import runtime
from nemo_rl_like.model.layouts import MicroBatch, empty_pass
from nemo_rl_like.model.mcore import (
    P2PCommunicator,
    ProcessGroupCollection,
    get_forward_backward_func,
    p2p_ops,
    parallel_state,
)

Reduce: TypeAlias = Callable[..., object]
"""What the schedule calls with the last stage's output."""
ForwardStep: TypeAlias = Callable[..., tuple[Tensor, Reduce]]
_GROUPS = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"]


class StageLinks(P2PCommunicator):
    """Messages between neighbours of the pipeline, those to the next rank and those to the previous one apart.

    Megatron sends the shapes of both directions in one batch. Where two ranks are each other's next and previous one, the messages of a batch
    are matched in the order of the calls, so that with virtual stages a rank takes the shape of an activation for that of a gradient.
    """

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        device = runtime.device()
        from_prev, from_next = (torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2))
        to_next, to_prev = (
            None if tensor is None else torch.tensor(tensor.shape, device=device)
            for tensor in (tensor_send_next, tensor_send_prev)
        )
        requests: Mapping[str, torch.distributed.Work] = p2p_ops(
            tensor_send_prev=to_prev,
            tensor_recv_prev=from_prev if recv_prev else None,
            tensor_send_next=to_next,
            tensor_recv_next=from_next if recv_next else None,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        return from_prev.tolist(), from_next.tolist()


def run_stages(
    stages: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    forward: ForwardStep,
    *,
    training: bool,
    **further: Any,
) -> None:
    """Run Megatron's schedule for this layout over the micro-batches, with gradients if `training`; `further` settings are the schedule's.

    `stages` are this rank's, in order, as they are or wrapped in DDP; they have one configuration, which says what becomes of the gradients.
    """
    passes = list(micro_batches)
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    if len(stages) > 1:  # an interleaved schedule goes round all ranks with as many micro-batches as there are ranks
        passes += [empty_pass(passes[0].kind)] * (-len(passes) % ranks)
    if ranks > 1:
        links = StageLinks(parallel_state.get_pipeline_model_parallel_group(), stages[0].config)
        groups = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        further = {**further, "p2p_communicator": links, "pg_collection": groups}
    rows, length = passes[0].input_ids.shape
    with torch.set_grad_enabled(training):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(passes) for _ in stages],
            model=list(stages),
            num_microbatches=len(passes),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=not training,
            **further,
        )
