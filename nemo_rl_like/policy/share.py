"""What some ranks of a policy know, on every rank."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model.mcore import parallel_state


def from_last_stages(values: Tensor) -> Tensor:
    """The sum over data-parallel ranks of what the last pipeline stages hold, in place and on every rank: one all-reduce.

    Tensor- and context-parallel ranks hold the same values, of which one counts; what other ranks hold does not.
    """
    one = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    tells = parallel_state.is_pipeline_last_stage() and one
    if not tells:
        values.zero_()
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
