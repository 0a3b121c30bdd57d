"""Megatron's distributed optimizer and its parameter scheduler, built from the spec.

The scheduler is stepped once before each optimizer step, so update k (from 1) runs at the learning rate of k:
warm-up reaches the peak at its last update, and a decaying schedule reaches `min_lr` just after the last update.
Weight decay reaches matrices only: Megatron marks vectors and biases, and the scheduler applies the mark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_like.model import runtime
from nemo_rl_like.model.mcore import (
    ChainedOptimizer,
    DistributedDataParallel,
    DistributedOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)
from nemo_rl_like.spec.stage import OptimizerSpec

_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one optimizer step reports: gradient norm before clipping and the learning rate used."""

    grad_norm: float
    lr: float


class PolicyOptimizer:
    """The optimizer of one rank's shard of the model.

    Args: `model` wrapped in Megatron's DDP; `spec`; `total_updates`, the optimizer steps the schedule spans.
    """

    def __init__(self, model: DistributedDataParallel, spec: OptimizerSpec, total_updates: int) -> None:
        bf16 = model.config.params_dtype is torch.bfloat16
        config = OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            min_lr=spec.min_lr,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.betas[0],
            adam_beta2=spec.betas[1],
            adam_eps=spec.eps,
            clip_grad=spec.clip_grad,
            bf16=bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
        )
        with runtime.optimizer_patches():
            built = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
        parts = built.chained_optimizers if isinstance(built, ChainedOptimizer) else [built]
        self._optimizer = built
        self._parts: list[DistributedOptimizer] = list(parts)
        for part in self._parts:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False
        decay_steps = (spec.decay_steps or total_updates) + 1
        self._scheduler = OptimizerParamScheduler(
            built,
            init_lr=0.0,
            max_lr=spec.lr,
            min_lr=spec.min_lr,
            lr_warmup_steps=spec.warmup_steps,
            lr_decay_steps=decay_steps,
            lr_decay_style=_STYLES[spec.schedule],
            start_wd=spec.weight_decay,
            end_wd=spec.weight_decay,
            wd_incr_steps=decay_steps,
            wd_incr_style="constant",
            wsd_decay_steps=max(1, round(decay_steps * spec.decay_fraction)),
            lr_wsd_decay_style="linear",
        )
        self._max_norm = spec.clip_grad

    @property
    def updates(self) -> int:
        """Optimizer steps made so far."""
        return int(self._scheduler.num_steps)

    def zero_grad(self) -> None:
        """Drop the gradients of the last step."""
        self._optimizer.zero_grad()

    def step(self) -> OptimizerStep | None:
        """Clip, update the weights, and gather them over data-parallel ranks.

        None if a gradient is not finite: weights, moments and schedule are then as before. Megatron's own `step` would have
        moved them, since it looks for such gradients only where there is a loss scaler.
        """
        with runtime.optimizer_patches():
            overflow = self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
            if overflow or not math.isfinite(norm):
                return None
            self._clip(norm)
            self._scheduler.step(increment=1)
            self._optimizer.step_with_ready_grads()
        lr = next(group["lr"] for group in self._optimizer.param_groups if group["params"])
        return OptimizerStep(grad_norm=norm, lr=float(lr))

    def _clip(self, norm: float) -> None:
        """Scale every gradient so that their norm over all ranks, which is `norm`, is at most the spec's."""
        for part in self._parts:
            parameters = part.get_parameters()
            if self._max_norm > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._max_norm, total_norm=norm)

    def shards(self) -> Iterator[tuple[DistributedOptimizer, torch.nn.Parameter, Tensor, int, int]]:
        """Each model parameter this rank owns a part of: (part, parameter, main shard [end-start], start, end)."""
        for part in self._parts:
            for parameter in part.model_param_gbuf_map:
                owned = part._get_model_param_range_map(parameter)["param"]
                group, order = part.model_param_group_index_map[parameter]
                yield part, parameter, part.optimizer.param_groups[group]["params"][order], owned.start, owned.end

    def restore(self, updates: int) -> None:
        """Set the schedule to `updates` optimizer steps done."""
        self._scheduler.num_steps = updates
        self._scheduler.step(increment=0)

    def reload_main_params(self) -> None:
        """Copy the model's weights into the optimizer's master copies (after loading weights)."""
        with runtime.optimizer_patches():
            self._optimizer.reload_model_params()
