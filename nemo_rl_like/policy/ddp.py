"""Megatron's DDP and schedules, set up so that a micro-batch's loss is a plain sum.

`calculate_per_token_loss` with a token count of 0 switches off every division that Megatron would make (by micro-batches,
by data-parallel ranks, by tokens): gradients are summed as they are, since the losses carry global denominators already.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_like.model import runtime
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.layouts import MicroBatch
from nemo_rl_like.model.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from nemo_rl_like.model.schedule import ForwardStep, run_stages


class PolicyDdp(DistributedDataParallel):
    """Megatron's DDP that sends nothing to itself: with one data-parallel rank, its shard is the whole buffer.

    gloo would copy both buffers of the model onto themselves, 0.4 s a step for 135 million parameters on two cores.
    """

    @property
    def _shared(self) -> bool:
        """Whether another rank holds a weight of this one's."""
        return bool(self.dp_cp_group.size() > 1 or self.expt_dp_group.size() > 1)

    def start_param_sync(self, *unused: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather the parameters' shards; those in FP8 have more to do after it."""
        if self._shared or self.ddp_config.fp8_param_gather:
            super().start_param_sync(*unused, force_sync=force_sync, force_dispatch=force_dispatch)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients."""
        if self._shared:
            super().finish_grad_sync(force_all_reduce=force_all_reduce)


def wrap_ddp(model: MegatronModel) -> list[PolicyDdp]:
    """The model's stages with gradient buffers that are summed over data-parallel ranks, in float32."""
    config = model.config
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, fp8_param_gather=config.fp8_param
    )
    wrapped = [PolicyDdp(config, settings, stage) for stage in model.stages]
    for ddp in wrapped:
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            runtime.use_huge_pages(buffer.param_data)
        if not config.fp8_param:  # collectives take no such tensors, and every rank has read the same ones
            ddp.broadcast_params()
    return wrapped


def run_schedule(
    model: MegatronModel,
    wrapped: Sequence[PolicyDdp] | None,
    micro_batches: Sequence[MicroBatch],
    forward: ForwardStep,
    *,
    training: bool,
    finalize: bool = True,
) -> None:
    """Run the model's stages, as they are or `wrapped`, over the micro-batches; with gradients if `training`.

    Without `finalize` the gradients stay in the ranks' buffers, not yet summed over ranks, for the next schedule to add to.
    """
    model.config.calculate_per_token_loss = True
    model.config.finalize_model_grads_func = finalize_model_grads if finalize else None
    run_stages(model, micro_batches, forward, training=training, wrapped=wrapped)
