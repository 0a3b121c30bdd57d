"""Scaling state of FP8 layers with the delayed recipe in a checkpoint: histories of largest values, from which the next factors come.

Transformer Engine keeps it as a module's extra state: bytes that only the module reads (`get_extra_state`, `set_extra_state`). Largest values
are taken over all ranks of a pipeline stage, so one of them knows a layer's state for all, and it holds at any tensor-, pipeline- and
data-parallel size. A layer of experts has one column for each that a rank holds, so their number must stay.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.pickles import require_harmless
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.spec.policy import Fp8Spec
from nemo_rl_like.tensors.packed import Packed

logger = logging.getLogger(__name__)

KIND = "fp8"
"""Before the names of such bytes, beside the kinds of the optimizer's state."""
ALLOWED = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch.FloatStorage",
    "torch.ByteStorage",
    "transformer_engine.common.recipe.*",
)
"""What the state, which is a pickle, may load: tensors and the recipe."""
FILE = "fp8.json"
"""Beside them: what they were made with."""


def scaling_modules(model: MegatronModel) -> dict[str, torch.nn.Module]:
    """This stage's modules with extra state, by a name that starts with the layer's number in the whole model."""
    found = {}
    for layer in model.layers:
        for path, module in layer.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                found[f"layers.{layer.layer_number - 1}.{path}"] = module
    return found


def scaling_shares(model: MegatronModel) -> Iterator[Packed]:
    """The state of this stage's layers, on the first of the stage's ranks."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if replica or parallel_state.get_tensor_model_parallel_rank():
        return
    for name, module in scaling_modules(model).items():
        state = _bytes_of(module)
        if state is not None:
            yield Packed((f"{KIND}/{name}",), state, lambda tensor: (tensor,))


def _bytes_of(module: torch.nn.Module) -> Tensor | None:
    """uint8 [n] its extra state, empty before the first step, as Transformer Engine gives and takes it; None: never any."""
    state = module.get_extra_state()
    if state is None:
        return None
    if not isinstance(state, Tensor):
        raise InputError(
            f"`policy.fp8.recipe: delayed` needs the package transformer-engine 2.0 or newer, whose layers tell their state as a tensor; "
            f"here it is a {type(state).__name__}"
        )
    return state.detach().cpu()


def write_scaling(folder: Path, fp8: Fp8Spec, experts_per_rank: int) -> None:
    """Say what the state was made with."""
    (folder / FILE).write_text(json.dumps(_made_with(fp8, experts_per_rank)) + "\n", encoding="utf-8")


def load_scaling(model: MegatronModel, folder: Path, reader: TensorReader, fp8: Fp8Spec, experts_per_rank: int) -> None:
    """Give this stage's modules their state from a checkpoint; one without any (made with another recipe) starts anew.

    Raises InputError for a state that was made with other settings, or that lacks a layer.
    """
    stored = {key for key in reader.keys() if key.startswith(f"{KIND}/")}
    if not stored:
        logger.warning("%s has no FP8 scaling state: the histories of the largest values start anew", folder)
        return
    _require_same(folder, _made_with(fp8, experts_per_rank))
    for name, module in scaling_modules(model).items():
        key = f"{KIND}/{name}"
        if key in stored:
            state = reader.get(key)
            if state.numel():
                require_harmless(state.numpy().tobytes(), ALLOWED, f"{folder}: FP8 scaling state of {name}")
            module.set_extra_state(state)
        elif _bytes_of(module) is not None:
            raise InputError(
                f"{folder} has FP8 scaling state, but none of {name}; it is of another model or damaged. Start anew from the checkpoint's "
                "weights in a stage of another name"
            )


def _made_with(fp8: Fp8Spec, experts_per_rank: int) -> dict[str, str | int]:
    return {
        "policy.fp8.amax_history_len": fp8.amax_history_len,
        "policy.fp8.amax_compute_algo": fp8.amax_compute_algo,
        "policy.fp8.margin": fp8.margin,
        "policy.fp8.format": fp8.format,
        "experts of a rank": experts_per_rank,
    }


def _require_same(folder: Path, mine: dict[str, str | int]) -> None:
    theirs = json.loads((folder / FILE).read_text(encoding="utf-8"))
    for name, value in mine.items():
        if theirs.get(name) != value:
            fix = "keep `policy.layout.ep`" if name.startswith("experts") else f"set it to {theirs.get(name)}"
            raise InputError(
                f"{folder} holds FP8 scaling state of {name} {theirs.get(name)}, which is {value} here; {fix} to go on, or start anew from "
                "the checkpoint's weights in a stage of another name"
            )
