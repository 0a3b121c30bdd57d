"""A pickle is looked into and not run: what it would load decides, whatever way it hides it."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.pickles import require_harmless
from nemo_rl_like.policy.fp8_state import ALLOWED


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.file}",)


def saved(value: object, *, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


GOOD = OrderedDict(scale=torch.ones(3), history=torch.zeros(2, 4), extra={"a": [1, 2.0, "x", None]})


@pytest.mark.parametrize("data", [pickle.dumps(GOOD), saved(GOOD, zipped=True)], ids=["plain", "torch"])
def test_state_passes(data: bytes) -> None:
    require_harmless(data, ALLOWED, "state")


@pytest.mark.parametrize("protocol", range(6))
def test_a_command_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "ran"
    with pytest.raises(InputError, match=r"a state is a pickle that is not let in: it would load (posix|os)\.system"):
        require_harmless(pickle.dumps({"x": [Evil(target)]}, protocol), ALLOWED, "a state")
    assert not target.exists()


def test_a_command_inside_a_torch_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="would load"):
        require_harmless(saved({"x": Evil(tmp_path / "ran")}, zipped=True), ALLOWED, "state")
    assert not (tmp_path / "ran").exists()


class Nested:
    """Hides a pickle in the bytes of a storage."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return torch.storage._load_from_bytes, (self.data,)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_command_inside_a_nested_storage_is_refused(tmp_path: Path, zipped: bool) -> None:
    inner = saved({"x": Evil(tmp_path / "ran")}, zipped=zipped)
    with pytest.raises(InputError, match=r"would load (posix|os)\.system"):
        require_harmless(pickle.dumps(Nested(inner)), ALLOWED, "state")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "builtins.getattr", "torch._utils._rebuild_tensor"])
def test_only_what_is_listed_is_let_in(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.raises(InputError, match="would load"):
        require_harmless(f"c{module}\n{attribute}\n.".encode(), ALLOWED, "state")


def test_a_listed_package_lets_in_what_is_below_it_alone() -> None:
    require_harmless(b"ca.b.c\nd\n.", ("a.b.*",), "state")
    with pytest.raises(InputError):
        require_harmless(b"ca.bc\nd\n.", ("a.b.*",), "state")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"PK\x03\x04 no zip", b"not a pickle"])
def test_damaged_bytes_are_an_error_that_says_so(data: bytes) -> None:
    with pytest.raises(InputError, match="state cannot be read as a pickle"):
        require_harmless(data, ALLOWED, "state")
