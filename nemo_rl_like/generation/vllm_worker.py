"""What runs inside vLLM's worker processes: reading new weights, checking them, and loading them for good.

Three traps of vLLM 0.32 are closed here. On the CPU its linear layers keep packed copies, so weights must go through
its layer-wise reload, not through `load_weights`. That reload does not pack the output head again when it is tied to
the input embedding, so that the engine would silently sample with the old head. And it packs experts when they are first loaded only.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise

from nemo_rl_like.generation import vllm_loader  # noqa: F401  # registers its load format
from nemo_rl_like.generation.vllm_report import WorkerReport
from nemo_rl_like.weights.errors import WeightSyncError
from nemo_rl_like.weights.manifest import compare
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle, read

Named = tuple[str, Tensor]


class _ModelRunner(Protocol):
    def get_model(self) -> torch.nn.Module: ...

    def reload_weights(self, weights_iterator: Iterator[Named]) -> None: ...


class WorkerExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`); `self` is the worker."""

    model_runner: _ModelRunner

    def nrl_update_weights(self, handle: str, expected: Sequence[str]) -> str:
        """Read the tensors that `handle` (a SharedMemoryHandle as text) describes and load them.

        `expected` are the Hugging Face names that the model needs. Every byte is read and hashed before the first one
        is loaded: if the bytes or names are wrong, the old weights stay. Returns a WorkerReport as text.
        """
        source = SharedMemoryHandle.from_json(handle)
        checksums: dict[str, str] = {}
        tensors: list[Named] = []
        try:
            for name, tensor, digest in self.nrl_read(source):
                checksums[name] = digest
                tensors.append((name, tensor))
            compare(source.manifest, checksums, expected=expected)
        except WeightSyncError as error:
            return WorkerReport(checksums, [], str(error)).to_json()
        return WorkerReport(checksums, sorted(self.nrl_load(tensors)), None).to_json()

    def nrl_read(self, handle: SharedMemoryHandle) -> Iterator[tuple[str, Tensor, str]]:
        """Name, tensor and sha256 of the bytes read, one tensor at a time."""
        return read(handle)

    def nrl_load(self, tensors: Sequence[Named]) -> set[str]:
        """Load tensors into the model; returns the names that reached a parameter."""
        model = self.model_runner.get_model()
        consumed: set[str] = set()
        # vLLM warns of layers without weights of their own (rotary, a tied head); what is missing is checked by name.
        logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)
        self.model_runner.reload_weights(weights_iterator=_tracked(model, tensors, consumed))
        self.nrl_pack_heads(model)
        self.nrl_pack_experts(model)
        return consumed

    def nrl_pack_heads(self, model: torch.nn.Module) -> None:
        """Pack the output head again: the reload skips one that is tied to the input embedding."""
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def nrl_pack_experts(self, model: torch.nn.Module) -> None:
        """Pack experts again on the CPU: the reload copies them as they come over what was packed."""
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if not isinstance(method, UnquantizedFusedMoEMethod) or method.moe_kernel is None:
                continue
            if method.unquantized_backend is UnquantizedMoeBackend.CPU:
                method.moe_kernel.fused_experts.process_weights_after_loading(module)


def _tracked(model: torch.nn.Module, tensors: Sequence[Named], consumed: set[str]) -> Iterator[Named]:
    """Yield `tensors`, and note in `consumed` the names of those that a parameter's loader is given.

    vLLM's reload replaces the parameters and their loaders before it takes the first tensor, so the loaders are wrapped
    at that moment. A tensor is known by its address: loaders get it whole, before fusing or sharding.
    """
    names = {tensor.data_ptr(): name for name, tensor in tensors}
    for parameter in model.parameters():
        loader: Callable[..., object] | None = getattr(parameter, "weight_loader", None)
        if loader is not None:
            parameter.weight_loader = _noting(loader, names, consumed)  # type: ignore[attr-defined]
    yield from tensors


def _noting(loader: Callable[..., object], names: dict[int, str], consumed: set[str]) -> Callable[..., object]:
    @functools.wraps(loader)  # vLLM recognises its own wrappers by __name__ and unwraps them by __wrapped__
    def note(*args: object, **kwargs: object) -> object:
        # Experts' loaders are called by keyword.
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        consumed.update(names[x.data_ptr()] for x in given if x.data_ptr() in names)
        return loader(*args, **kwargs)

    return note
