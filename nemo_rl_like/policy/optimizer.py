"""Megatron's distributed optimizer and its parameter scheduler, built from the spec.

The scheduler is stepped once before each optimizer step, so update k (from 1) runs at the learning rate of k:
warm-up reaches the peak at its last update, and a decaying schedule reaches `min_lr` just after the last update.
Every parameter's peak learning rate and weight decay stand in its Megatron group, where the scheduler reads them.

Megatron's class takes AdamW alone, for the sake of its own checkpoint format, which is not used here. What it shards, clips,
keeps in float32 and gathers is the same for any optimizer, so SGD and Muon take AdamW's place inside it once it is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.mcore import (
    ChainedOptimizer,
    DistributedDataParallel,
    DistributedOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    ParamKey,
    ParamPredicate,
    TransformerConfig,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
    parallel_state,
)
from nemo_rl_like.model.weight_entries import Entry
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.policy.backend import OptimizerStep
from nemo_rl_like.policy.groups import Settings, settings_of
from nemo_rl_like.policy.muon import MOMENTUM, Muon
from nemo_rl_like.policy.offload import HostOptimizer
from nemo_rl_like.policy.slices import Slice, slices_of
from nemo_rl_like.spec.offload import MUON_ON_HOST
from nemo_rl_like.spec.optimizer import AdamMoments, MuonOptimizer, OptimizerSpec, SgdOptimizer

MASTER = "master"
"""Kind of state: the float32 copy of bfloat16 weights."""
ADAM_STATE = ("exp_avg", "exp_avg_sq")
_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}


class PolicyOptimizer:
    """The optimizer of one rank's shard of the model.

    Args: `model`, and its stages `wrapped` in Megatron's DDP; `weight_map` of the parameters that are trained; `spec`; `total_updates`, the optimizer
    steps the schedule spans; `on_host` keeps its state in host memory. Raises SpecError for groups that do not fit the model.
    """

    def __init__(
        self,
        model: MegatronModel,
        wrapped: Sequence[DistributedDataParallel],
        weight_map: WeightMap,
        spec: OptimizerSpec,
        total_updates: int,
        *,
        on_host: bool = False,
    ) -> None:
        self.kind = spec.kind
        self._settings = settings_of(spec, weight_map.entries)
        self._masters = (MASTER,) if model.config.params_dtype is torch.bfloat16 else ()
        entries = dict(weight_map.local_entries(model))
        made_of = {p: entries[name] for name, p in model.named_parameters() if p.requires_grad}
        with runtime.optimizer_patches():
            built = get_megatron_optimizer(
                _config(spec, model.config),
                list(wrapped),
                config_overrides=_overrides({p: self._settings[entry] for p, entry in made_of.items()}),
                use_gloo_process_groups=False,
            )
        parts = built.chained_optimizers if isinstance(built, ChainedOptimizer) else [built]
        self._optimizer = built
        self._parts: list[DistributedOptimizer] = list(parts)
        # Megatron counts a gradient that ranks share once, but takes the ranks of dense layers for those of experts.
        for part in filter(_is_of_experts, self._parts):
            part.tp_group = parallel_state.get_expert_tensor_parallel_group()
        self._config, self._wrapped = model.config, wrapped
        self._adams: list[torch.optim.Optimizer] = []
        self._hosts: list[HostOptimizer] = []
        for part in self._parts:
            if on_host:
                part.optimizer = self._on_host(part, spec)
                continue
            if isinstance(spec, SgdOptimizer):
                part.optimizer = _sgd(part.optimizer.param_groups, spec.momentum)
                continue
            self._adams.append(_fused(part.optimizer))
            if isinstance(spec, MuonOptimizer):
                part.optimizer = Muon(part, spec, weight_map, made_of)
        self._scheduler = scheduler_of(built, spec, total_updates)
        self._max_norm = spec.clip_grad

    def _on_host(self, part: DistributedOptimizer, spec: OptimizerSpec) -> HostOptimizer:
        """What takes the part's place. Raises SpecError for Muon."""
        if isinstance(spec, MuonOptimizer):
            raise SpecError(MUON_ON_HOST)
        if isinstance(spec, SgdOptimizer):
            made = HostOptimizer(part, partial(_sgd, momentum=spec.momentum))
        else:
            made = HostOptimizer(part, partial(torch.optim.AdamW, betas=spec.betas, eps=spec.eps))
            self._adams.append(_fused(made.inner))
        self._hosts.append(made)
        return made

    @property
    def updates(self) -> int:
        """Optimizer steps made so far."""
        return int(self._scheduler.num_steps)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it keeps for the device's sake."""
        return sum(host.host_bytes for host in self._hosts)

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
            self._update()
        return OptimizerStep(grad_norm=norm, lr=float(self._scheduler.get_lr({})))

    def _update(self) -> None:
        """Move the weights, and gather those of other ranks."""
        if not self._hosts:
            self._optimizer.step_with_ready_grads()
            return
        for host in self._hosts:
            host.step()
        self._gather()

    def _gather(self) -> None:
        """Bring the weights of all data-parallel ranks together."""
        for stage in self._wrapped:
            stage.start_param_sync()

    def _clip(self, norm: float) -> None:
        """Scale every gradient so that their norm over all ranks, which is `norm`, is at most the spec's."""
        for part in self._parts:
            parameters = part.get_parameters()
            if self._max_norm > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._max_norm, total_norm=norm)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of state that some parameter has."""
        return tuple(dict.fromkeys(kind for entry in self._settings for kind in self.kinds_of(entry)))

    def kinds_of(self, entry: Entry) -> tuple[str, ...]:
        """Kinds of state that this parameter has."""
        momentum = self.kind == "sgd" or self._settings[entry].muon
        return (*((MOMENTUM,) if momentum else ADAM_STATE), *self._masters)

    def slices(self) -> Iterator[tuple[Slice, dict[str, Any]]]:
        """This rank's slices of parameters, each with its state."""
        for host in self._hosts:
            yield from host.slices()
        for part in self._parts if not self._hosts else ():
            for owned in slices_of(part):
                yield owned, part.optimizer.state[owned.main]

    def restore(self, updates: int) -> None:
        """Set the schedule, and Adam's own count, to `updates` optimizer steps done."""
        self._scheduler.num_steps = updates
        self._scheduler.step(increment=0)
        for adam in self._adams:
            _set_count(adam, updates)
        if self._config.fp8_param:
            self._round_masters()

    def _round_masters(self) -> None:
        """Make the FP8 weights of the master copies: what a checkpoint has of them was rounded to the model's type in between."""
        for part in self._parts:
            part._copy_main_params_to_model_params()
        self._gather()

    def reload_main_params(self) -> None:
        """Copy the model's weights into the optimizer's master copies (after loading weights)."""
        for host in self._hosts:
            host.reload()
        if not self._hosts:
            with runtime.optimizer_patches():
                self._optimizer.reload_model_params()


def scheduler_of(
    optimizer: ChainedOptimizer | DistributedOptimizer | torch.optim.Optimizer, spec: OptimizerSpec, total_updates: int
) -> OptimizerParamScheduler:
    """Megatron's scheduler of these groups, which have their peak `max_lr`, `min_lr` and weight decay (`start_wd`, `end_wd`)."""
    decay_steps = (spec.decay_steps or total_updates) + 1
    return OptimizerParamScheduler(
        optimizer,
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


def _is_of_experts(part: DistributedOptimizer) -> bool:
    """Whether its parameters are on other ranks than those of dense layers."""
    return any(not getattr(parameter, "allreduce", True) for buffer in part.buffers for parameter in buffer.params)


def _config(spec: OptimizerSpec, model: TransformerConfig) -> OptimizerConfig:
    """Megatron's settings; those of Adam are read where the spec has any."""
    adam = spec if isinstance(spec, AdamMoments) else spec.adamw if isinstance(spec, MuonOptimizer) else AdamMoments()
    return OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_eps=adam.eps,
        clip_grad=spec.clip_grad,
        bf16=model.params_dtype is torch.bfloat16,
        params_dtype=model.params_dtype,
        fp8_recipe=model.fp8_recipe if model.fp8_param else None,
        use_distributed_optimizer=True,
    )


def _overrides(settings: Mapping[torch.nn.Parameter, Settings]) -> dict[ParamKey, dict[str, float | bool]]:
    """Megatron's groups: one for all parameters of equal settings, with the numbers that its scheduler reads."""
    found = {}
    for one in set(settings.values()):
        members = {parameter for parameter, own in settings.items() if own == one}
        decay = {"start_wd": one.weight_decay, "end_wd": one.weight_decay}
        key = ParamKey(predicate=ParamPredicate(name=str(asdict(one)), fn=members.__contains__))
        found[key] = {"max_lr": one.lr, "min_lr": one.min_lr, "muon": one.muon, **decay}
    return found


def _fused(adam: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, its step as one kernel; Transformer Engine's is one anyway."""
    if isinstance(adam, torch.optim.AdamW):
        for group in adam.param_groups:
            group["fused"], group["foreach"] = True, False
    return adam


def _sgd(groups: list[dict[str, Any]], momentum: float) -> torch.optim.SGD:
    """PyTorch's SGD over groups of slices, which are views and therefore no parameters that its constructor takes."""
    made = torch.optim.SGD([torch.zeros(0)], momentum=momentum)
    made.param_groups = [{**made.defaults, **group} for group in groups]
    return made


def _set_count(adam: torch.optim.Optimizer, updates: int) -> None:
    """Set Adam's count of steps: PyTorch keeps one a parameter, which must not be shared, Transformer Engine one a group."""
    for group in adam.param_groups:
        if isinstance(adam, torch.optim.AdamW):
            for main in group["params"]:
                adam.state[main]["step"] = torch.tensor(float(updates), dtype=torch.float32, device=main.device)
        else:
            group["step"] = updates
