"""Two pipeline ranks that send activations and gradients of different lengths to each other at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_like.spec.policy import LayoutSpec
from tests.policy.ranks import run_ranks

LENGTHS = ((3, 4), (5, 7))
"""Tokens of the activation and of the gradient that each rank sends."""


def exchange(rank: int, world: int, port: int) -> list[tuple[list[float], list[float]]]:
    """What each rank gets from the previous rank and from the next one."""
    from nemo_rl_like.model import runtime
    from nemo_rl_like.model.mcore import TransformerConfig, parallel_state
    from nemo_rl_like.model.schedule import StageLinks

    runtime.init_distributed(rank, world, "127.0.0.1", port, LayoutSpec(pp=world, vpp=2), 60.0, 1)
    config: Any = TransformerConfig(
        num_layers=4,
        hidden_size=1,
        num_attention_heads=1,
        pipeline_model_parallel_size=world,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall",
    )
    links = StageLinks(parallel_state.get_pipeline_model_parallel_group(), config)
    activation, gradient = (torch.arange(float(n)).view(n, 1, 1) + 10 * rank for n in LENGTHS[rank])
    from_previous, from_next = links.send_forward_backward_recv_forward_backward(
        activation, gradient, recv_prev=True, recv_next=True, tensor_shape=(1, 1, 1)
    )
    got: list[Any] = [None] * world
    dist.all_gather_object(got, (from_previous.flatten().tolist(), from_next.flatten().tolist()))
    return got


def test_shapes_of_the_two_directions_do_not_cross(tmp_path: Path) -> None:
    """With two ranks each is the other's next and previous one. Megatron's own exchange of shapes crosses here."""
    both = run_ranks(exchange, 2, tmp_path)
    for rank, (activation, gradient) in enumerate(both):
        other = 1 - rank
        assert activation == [10.0 * other + i for i in range(LENGTHS[other][0])]
        assert gradient == [10.0 * other + i for i in range(LENGTHS[other][1])]
