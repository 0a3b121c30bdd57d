"""The Megatron Core names that training needs, imported after the CPU shim and with import warnings hidden."""

from __future__ import annotations

from nemo_rl_like.model import runtime

runtime.install()
with runtime.quiet():
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func

__all__ = [
    "ChainedOptimizer",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "clip_grad_by_total_norm_fp32",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_megatron_optimizer",
    "parallel_state",
]
