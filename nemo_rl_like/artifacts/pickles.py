"""Looks into a pickle without running it, for state that a library insists on unpickling itself."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Sequence

from nemo_rl_like.artifacts.errors import InputError

_ZIP = b"PK\x03\x04"
_MEMBER = "/data.pkl"
_NESTED = "torch.storage._load_from_bytes"
_LEGACY, _LEGACY_PICKLES = 0x1950A86A20F9469CFC6C, 4
"""PyTorch's older format begins with this number; protocol, system, object and keys follow, a pickle each."""


class _Inert:
    """Stands for whatever an allowed global would have made; takes anything, does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> _Inert:
        return object.__new__(cls)

    def __call__(self, *args: object, **kwargs: object) -> _Inert:
        return self

    def __setstate__(self, state: object) -> None:
        """Take no state."""

    def __setitem__(self, key: object, value: object) -> None:
        """Keep nothing."""

    def append(self, value: object) -> None:
        """Keep nothing."""

    def extend(self, values: object) -> None:
        """Keep nothing."""


class _Inspector(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, allowed: Sequence[str]) -> None:
        super().__init__(stream)
        self._allowed = tuple(allowed)

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        full = f"{module}.{name}"
        if full == _NESTED:
            return self._nested
        if not any(full == one or (one.endswith(".*") and full.startswith(one[:-1])) for one in self._allowed):
            raise InputError(f"it would load {full}")
        return _Inert

    def _nested(self, data: bytes) -> _Inert:
        """A storage that PyTorch pickled by itself: its bytes are inspected too."""
        _inspect(data, self._allowed)
        return _Inert()

    def persistent_load(self, pid: object) -> _Inert:
        return _Inert()


def _inspect(data: bytes, allowed: Sequence[str]) -> None:
    stream = io.BytesIO(_pickle_in(data))
    first = _Inspector(stream, allowed).load()
    if first == _LEGACY:
        for _ in range(_LEGACY_PICKLES):
            _Inspector(stream, allowed).load()


def require_harmless(data: bytes, allowed: Sequence[str], what: str) -> None:
    """See that a pickle, plain or as torch.save writes it, loads nothing but what is allowed.

    Args:
        data: the bytes.
        allowed: dotted names; `package.module.*` allows everything below it.
        what: where the bytes come from, for the message.

    Raises:
        InputError: it would load something else, or is no pickle.
    """
    try:
        _inspect(data, allowed)
    except InputError as error:
        raise InputError(
            f"{what} is a pickle that is not let in: {error}; load only checkpoints that this package wrote, or start anew from the weights"
        ) from error
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        raise InputError(
            f"{what} cannot be read as a pickle: {type(error).__name__}: {error}; the file is damaged"
        ) from error


def _pickle_in(data: bytes) -> bytes:
    if not data.startswith(_ZIP):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(_MEMBER) or name == _MEMBER[1:]]
        return archive.read(member)
