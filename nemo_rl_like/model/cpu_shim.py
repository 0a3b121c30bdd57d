"""Lets Megatron Core 0.16 run on a machine without CUDA, without changing torch for anybody else.

Megatron names CUDA outright (`torch.cuda.current_device()`, `device="cuda"`, CUDA random states, `Tensor.type()` compared
with `torch.cuda.FloatTensor`). `install()` puts an import hook in place: each `megatron.core` module sees a stand-in for its
global name `torch` whose CUDA calls mean the CPU. The real torch module is not changed, but for `Tensor.cuda`, which can only
raise on such a machine and becomes the identity.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
_PACKAGE = "megatron.core"
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "arange",
    "eye",
    "linspace",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "as_tensor",
    "empty_strided",
    "randint",
    "triu_indices",
    "tril_indices",
)


class _Stream:
    """A CUDA stream or event whose work is always done."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: object = None) -> _Stream:
        """An event that has happened."""
        return self

    def record(self, stream: object = None) -> None:
        """Nothing to record."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True


class _CpuCuda(types.ModuleType):
    """`torch.cuda` as Megatron's modules see it: every device is the CPU; what is not listed is the real module's."""

    Stream = _Stream
    Event = _Stream

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self._stream = _Stream()

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        """The CPU."""
        return CPU

    def is_available(self) -> bool:
        """No CUDA here."""
        return False

    def device_count(self) -> int:
        """One, so that `rank % device_count()` has a value."""
        return 1

    def current_stream(self, device: object = None) -> _Stream:
        """The only stream."""
        return self._stream

    def default_stream(self, device: object = None) -> _Stream:
        """The only stream."""
        return self._stream

    def stream(self, stream: object) -> AbstractContextManager[None]:
        """No stream to enter."""
        return nullcontext()

    def device(self, device: object) -> AbstractContextManager[None]:
        """No device to enter."""
        return nullcontext()

    def synchronize(self, device: object = None) -> None:
        """CPU work is done when it returns."""

    def set_device(self, device: object) -> None:
        """There is one device."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def is_current_stream_capturing(self) -> bool:
        """No CUDA graphs."""
        return False

    def manual_seed(self, seed: int) -> None:
        """Seeds the CPU generator."""
        torch.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """State of the CPU generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Sets the CPU generator."""
        torch.set_rng_state(state)

    def memory_allocated(self, device: object = None) -> int:
        """No device memory."""
        return 0

    def max_memory_allocated(self, device: object = None) -> int:
        """No device memory."""
        return 0

    def memory_reserved(self, device: object = None) -> int:
        """No device memory."""
        return 0


class _CpuTorch(types.ModuleType):
    """`torch` as Megatron's modules see it: factories put `device="cuda"` on the CPU; the rest is the real module's."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__["cuda"] = _CpuCuda()
        for name in _FACTORIES:
            self.__dict__[name] = _on_cpu(getattr(torch, name))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


class CpuRngTracker:
    """The interface of Megatron's CUDA random-state tracker, on the CPU generator."""

    use_cudagraphable_rng = False
    is_inference_rng_tracker = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every state."""
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()
        self._initialized = False

    def is_initialized(self) -> bool:
        """Whether a state was added or set."""
        return self._initialized

    def get_states(self) -> dict[str, torch.Tensor]:
        """Random states by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace every state."""
        self._states, self._initialized = dict(states), True

    def add(self, name: str, seed: int) -> None:
        """Add a state made from `seed`. Raises ValueError if the name or the seed is taken."""
        if seed in self._seeds or name in self._states:
            raise ValueError(f"random state {name!r} or its seed {seed} exists already")
        self._initialized = True
        self._seeds.add(seed)
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the named state inside the block, and keep where it got to."""
        if name not in self._states:
            raise ValueError(f"random state {name!r} was never added")
        outer = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


class _Loader(importlib.abc.Loader):
    """Runs a Megatron module, then points its `torch` at the stand-in."""

    def __init__(self, loader: importlib.abc.Loader, stand_in: types.ModuleType) -> None:
        self._loader, self._stand_in = loader, stand_in

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """As the wrapped loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's code, then adapt it."""
        self._loader.exec_module(module)
        _adapt(module, self._stand_in)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `megatron.core` modules and wraps their loaders."""

    def __init__(self, stand_in: types.ModuleType) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec with a wrapped loader; None for modules that are not Megatron's."""
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._stand_in)
        return spec


def install() -> None:
    """Put the stand-in in place. Raises RuntimeError if Megatron Core was imported before; a second call does nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before nemo_rl_like.model.runtime.install(); import nemo_rl_like.model.mcore first"
        )
    torch.Tensor.cuda = _identity  # type: ignore[method-assign, assignment]
    sys.meta_path.insert(0, _Finder(_CpuTorch()))


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Inside the block `Tensor.type()` answers as on CUDA, which Megatron's optimizer compares with literal type names."""
    real = torch.Tensor.type

    def cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> object:
        answer = real(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = cuda_name  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]


def _identity(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _adapt(module: types.ModuleType, stand_in: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = stand_in
    if module.__name__ == f"{_PACKAGE}.jit":
        module.disable_jit_fuser()
    if module.__name__ == f"{_PACKAGE}.tensor_parallel.random":
        module.__dict__["_get_cuda_rng_state"] = lambda *args, **kwargs: torch.get_rng_state()
        module.__dict__["_set_cuda_rng_state"] = lambda state, *args, **kwargs: torch.set_rng_state(state)
        module.__dict__["_CUDA_RNG_STATE_TRACKER"] = CpuRngTracker()
        module.__dict__["_CUDA_RNG_STATE_TRACKER_INITIALIZED"] = True
    if module.__name__ == f"{_PACKAGE}.tensor_parallel.mappings":
        _let_sizes_differ(module)
    if module.__name__ == f"{_PACKAGE}.transformer.moe.moe_utils":
        module.__dict__.setdefault("te_general_gemm", None)  # Megatron binds it only where Transformer Engine is
        module.__dict__["maybe_move_tensor_to_cpu"] = _as_on_host


def _as_on_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Megatron's `maybe_move_tensor_to_cpu`, which leaves a tensor that lies on the CPU as it is, an array or not."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _let_sizes_differ(mappings: types.ModuleType) -> None:
    """Gather and reduce-scatter parts of different sizes, which gloo can only send from all to all."""
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_any(x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: Any = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, use_global_buffer)
        out = x.new_empty(sum(output_split_sizes), *x.shape[1:])
        sent = torch.cat([x] * group.size())
        dist.all_to_all_single(out, sent, list(output_split_sizes), [x.shape[0]] * group.size(), group=group)
        return out

    def reduce_scatter_any(
        x: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: Any = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(x, group, input_split_sizes, use_global_buffer)
        own = input_split_sizes[group.rank()]
        parts = x.new_empty(own * group.size(), *x.shape[1:])
        dist.all_to_all_single(parts, x.contiguous(), [own] * group.size(), list(input_split_sizes), group=group)
        return parts.unflatten(0, (group.size(), own)).sum(0)

    mappings.__dict__["_gather_along_first_dim"] = gather_any
    mappings.__dict__["_reduce_scatter_along_first_dim"] = reduce_scatter_any
