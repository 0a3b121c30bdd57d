"""Laws of the runtime and the CPU shim: torch itself stays as it was, and what needs a GPU says so."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.cpu_shim import CpuRngTracker
from nemo_rl_like.spec.policy import LayoutSpec

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")

SHIM = """
import logging, sys, warnings
logging.basicConfig(level=logging.WARNING)
warnings.simplefilter("always")
import torch
zeros, current = torch.zeros, torch.cuda.current_device
from nemo_rl_like.model import mcore, runtime
from nemo_rl_like.spec.policy import LayoutSpec
from megatron.core.tensor_parallel import layers, random
assert torch.zeros is zeros and torch.cuda.current_device is current
assert layers.torch is not torch and layers.torch.nn is torch.nn
assert layers.torch.zeros(2, device="cuda").device.type == "cpu"
assert layers.torch.cuda.current_device() == torch.device("cpu")
assert not torch.cuda.is_available()
runtime.init_distributed(0, 1, "127.0.0.1", int(sys.argv[1]), LayoutSpec(), 60.0, 1)
runtime.manual_seed(3)
first = torch.rand(1)
with random.get_cuda_rng_tracker().fork():
    inner = torch.rand(1)
runtime.manual_seed(3)
assert torch.equal(torch.rand(1), first) and not torch.equal(first, inner)
runtime.shutdown_distributed()
"""
TOO_LATE = """
import megatron.core
from nemo_rl_like.model import runtime
try:
    runtime.install()
except RuntimeError as error:
    assert "before nemo_rl_like.model.runtime.install()" in str(error)
else:
    raise SystemExit("the shim went in after Megatron")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@on_cpu
def test_megatron_sees_a_cpu_while_torch_is_unchanged_and_nothing_warns(unused_tcp_port: int) -> None:
    done = run(SHIM, str(unused_tcp_port))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "megatron" not in done.stderr.lower()


@on_cpu
def test_installing_after_megatron_is_refused() -> None:
    done = run(TOO_LATE)
    assert done.returncode == 0, done.stdout + done.stderr


@on_cpu
def test_type_names_are_changed_inside_the_block_only() -> None:
    x = torch.zeros(1)
    with runtime.optimizer_patches():
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.type(torch.float64).dtype == torch.float64
    assert x.type() == "torch.FloatTensor"
    with pytest.raises(KeyError), runtime.optimizer_patches():
        raise KeyError
    assert x.type() == "torch.FloatTensor"


@on_cpu
def test_what_needs_a_gpu_says_why() -> None:
    able = runtime.capabilities()
    for capability in (able.cuda, able.fp8, able.cuda_ipc, able.transformer_engine):
        assert not capability.available
        assert "CUDA" in capability.reason
    for recipe in ("tensorwise", "blockwise", "mxfp8", "delayed"):
        assert not runtime.fp8_capability(recipe).available
    assert runtime.device() == torch.device("cpu")
    assert runtime.backend() == "gloo"


def test_a_world_of_another_size_than_the_layout_is_refused() -> None:
    with pytest.raises(InputError, match=r"tp \* cp \* pp \* dp = 2 \* 1 \* 1 \* 1 = 2 ranks, and the world 3"):
        runtime.init_distributed(0, 3, "127.0.0.1", 1, LayoutSpec(tp=2), 1.0)


def test_a_random_state_goes_on_where_it_stopped() -> None:
    tracker = CpuRngTracker()
    tracker.add("a", 5)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(1)
    with tracker.fork("a"):
        second = torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), first)
    assert torch.equal(torch.rand(1), second)
    for name, seed in (("a", 6), ("b", 5)):
        with pytest.raises(ValueError, match="exists already"):
            tracker.add(name, seed)
    with pytest.raises(ValueError, match="never added"), tracker.fork("b"):
        pass


@on_cpu
def test_huge_pages_change_no_value_and_leave_short_or_empty_tensors_alone() -> None:
    for count in (0, 3, 5 << 20):
        values = torch.arange(count, dtype=torch.float32)
        before = values.clone()
        runtime.use_huge_pages(values)
        assert torch.equal(values, before)


@on_cpu
def test_a_tensors_whole_huge_pages_are_advised_and_nothing_outside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Libc:
        @staticmethod
        def madvise(start: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
            calls.append((start.value or 0, length.value))
            return -1  # as an old kernel answers

    tensor = torch.zeros(2 << 20)
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: Libc())
    runtime.use_huge_pages(tensor[3:])
    assert len(calls) == 2
    for start, length in calls:
        assert length > 0 and start % (2 << 20) == 0 and length % (2 << 20) == 0
        assert tensor[3:].data_ptr() <= start and start + length <= tensor.data_ptr() + tensor.nbytes
