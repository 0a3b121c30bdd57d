"""The one module that branches on the device: CPU with gloo, or CUDA with NCCL.

`install()` must run before the first Megatron import; importing `nemo_rl_like.model.mcore` does it.
"""

from __future__ import annotations

import ctypes
import datetime
import logging
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import cpu_shim
from nemo_rl_like.spec.policy import LayoutSpec

logger = logging.getLogger(__name__)
_RECIPE_NEEDS = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "delayed": (8, 9)}
"""Compute capability that each recipe of `policy.fp8` needs."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGE = 1 << 21


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether this machine can do something, and why not."""

    available: bool
    reason: str
    """Empty when available."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What needs a GPU or a GPU package, asked in one place."""

    cuda: Capability
    transformer_engine: Capability
    fp8: Capability
    cuda_ipc: Capability


def install() -> None:
    """Make Megatron importable here: the CPU shim where there is no CUDA, and nothing where there is."""
    if not on_cuda():
        cpu_shim.install()


def on_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def backend() -> str:
    """Name of the collective backend: "nccl" or "gloo"."""
    return "nccl" if on_cuda() else "gloo"


def synchronize() -> None:
    """Wait until the device has done all its work (for timers)."""
    if on_cuda():
        torch.cuda.synchronize()


def capabilities() -> Capabilities:
    """What this machine offers; each missing one says why."""
    if not on_cuda():
        why = "needs a CUDA GPU; this process sees none"
        missing = Capability(False, why)
        return Capabilities(missing, missing, missing, missing)
    yes = Capability(True, "")
    engine = yes if find_spec("transformer_engine") else Capability(False, "needs the package transformer-engine")
    major, minor = torch.cuda.get_device_capability()
    fp8 = engine
    if engine.available and (major, minor) < (8, 9):
        fp8 = Capability(False, f"FP8 needs compute capability 8.9 or newer; this GPU has {major}.{minor}")
    return Capabilities(cuda=yes, transformer_engine=engine, fp8=fp8, cuda_ipc=yes)


def fp8_capability(recipe: str) -> Capability:
    """Whether this machine computes FP8 with a recipe of `policy.fp8`."""
    able = capabilities().fp8
    needed = _RECIPE_NEEDS[recipe]
    if able.available and torch.cuda.get_device_capability() < needed:
        major, minor = torch.cuda.get_device_capability()
        return Capability(False, f"needs compute capability {needed[0]}.{needed[1]}; this GPU has {major}.{minor}")
    return able


def exact_float32() -> None:
    """Let float32 products on a GPU be float32, not TF32; before the first of them.

    Transformer Engine asks for TF32 without a way to say no but this variable of NVIDIA's libraries. With it, trainer and
    engine would be 1e-3 apart for nothing but the shapes of their batches.
    """
    if on_cuda():
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


def manual_seed(seed: int) -> None:
    """Seed torch's generators and Megatron's model-parallel ones (needs `init_distributed`)."""
    from nemo_rl_like.model.mcore import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def optimizer_patches() -> AbstractContextManager[None]:
    """Context for building a Megatron optimizer and for its `step()`; does nothing on CUDA."""
    return nullcontext() if on_cuda() else cpu_shim.cuda_type_names()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what Megatron warns about at import and configuration (packages and options this project does not use)."""
    names = ("megatron.core", "torch._dynamo")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def init_distributed(
    rank: int,
    world: int,
    master_addr: str,
    master_port: int,
    layout: LayoutSpec,
    timeout_s: float,
    threads: int = 0,
) -> None:
    """Join the world of ranks and make Megatron's groups; ranks are row-major in (pp, dp, cp, tp), tp fastest, and those of a
    stage in (ep, etp) for its experts.

    `threads` are this rank's CPU threads (0: leave as they are); `timeout_s` bounds every collective, in seconds.
    Raises InputError if the layout has another number of ranks than `world`. A second call only remakes the
    model-parallel groups for another layout of the same world, and does nothing for the same layout.
    """
    if world != layout.ranks:
        raise InputError(
            f"the layout has tp * cp * pp * dp = {layout.tp} * {layout.cp} * {layout.pp} * {layout.dp} = {layout.ranks} ranks, and the world "
            f"{world}; change one of the sizes"
        )
    join_world(rank, world, master_addr, master_port, timeout_s, threads)
    _init_model_parallel(layout, timeout_s)
    logger.debug("rank %d of %d joined on %s with %s", rank, world, device(), layout)


def join_world(rank: int, world: int, master_addr: str, master_port: int, timeout_s: float, threads: int = 0) -> None:
    """Join the world of ranks, without Megatron's groups; does nothing but set `threads` where this process is in it already."""
    if threads:
        torch.set_num_threads(threads)
    if not on_cuda():
        keep_freed_memory()
    if dist.is_initialized():
        return
    _choose_device(rank)
    dist.init_process_group(
        backend(),
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def shutdown_distributed() -> None:
    """Leave the world; safe to call when never joined."""
    if not dist.is_initialized():
        return
    from nemo_rl_like.model.mcore import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _choose_device(rank: int) -> None:
    if on_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))


def _init_model_parallel(layout: LayoutSpec, timeout_s: float) -> None:
    from nemo_rl_like.model.mcore import parallel_state

    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        if sizes == (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.expert_tp):
            return  # a second model of the same ranks, for example a frozen reference
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )


def host_empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised host memory of a tensor's shape, and of its type unless `dtype` says another; page-locked where a GPU copies to it."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=on_cuda())


def keep_freed_memory() -> None:
    """Let glibc reuse freed host memory instead of giving it back to the system.

    Activations come and go each layer; mapping and zeroing their pages anew costs about 7 % of a CPU step. What CUDA's caching
    allocator does for a GPU.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to hold a contiguous CPU tensor's memory in huge pages (2 MiB); its values stay as they are.

    Decoding reads every weight once a token, where small pages cost address look-ups. A kernel that cannot is left alone, and
    so is a tensor on a GPU, an empty one, or one without a whole huge page.
    """
    if tensor.device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE - start
    if length <= 0:
        return
    libc = ctypes.CDLL(None)
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
