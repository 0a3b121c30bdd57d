"""Laws of content hashes: they see every change of content and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import EDGE_BYTES, canonical_json, fingerprint_path, hash_json, hash_path
from nemo_rl_like.artifacts.types import Checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a"
    (made / "sub").mkdir(parents=True)
    (made / "x").write_bytes(b"1")
    (made / "sub/y").write_bytes(b"2")
    return made


def test_a_copy_with_other_times_has_the_same_hash(folder: Path) -> None:
    copy = folder.with_name("b")
    shutil.copytree(folder, copy)
    os.utime(copy / "x", (1, 1))
    (copy / "empty").mkdir()
    assert hash_path(copy) == hash_path(folder)
    assert fingerprint_path(copy) == fingerprint_path(folder)


@pytest.mark.parametrize("change", ["content", "name", "place", "more", "less"])
def test_every_change_of_content_changes_both_hashes(folder: Path, change: str) -> None:
    before = hash_path(folder), fingerprint_path(folder)
    match change:
        case "content":
            (folder / "sub/y").write_bytes(b"3")
        case "name":
            (folder / "x").rename(folder / "z")
        case "place":
            (folder / "sub/y").rename(folder / "y")
        case "more":
            (folder / "new").write_bytes(b"")
        case "less":
            (folder / "x").unlink()
    assert hash_path(folder) != before[0]
    assert fingerprint_path(folder) != before[1]


@pytest.mark.parametrize("size", [1, EDGE_BYTES, EDGE_BYTES + 1, 3 * EDGE_BYTES])
def test_a_fingerprint_sees_both_edges_and_the_size(tmp_path: Path, size: int) -> None:
    file = tmp_path / "f"
    seen = set()
    for at in {0, size - 1}:
        data = bytearray(size)
        data[at] = 1
        file.write_bytes(data)
        seen.add(fingerprint_path(file))
    file.write_bytes(bytes(size))
    seen.add(fingerprint_path(file))
    file.write_bytes(bytes(size + 1))
    seen.add(fingerprint_path(file))
    assert len(seen) == len({0, size - 1}) + 2


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    for function in (hash_path, fingerprint_path, Checkpoint.of):
        with pytest.raises(InputError, match="gone"):
            function(tmp_path / "gone")


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_the_order_of_keys_does_not_count(value: dict[str, int | str | None]) -> None:
    assert hash_json(dict(reversed(value.items()))) == hash_json(value)


def test_canonical_json_tells_types_apart_and_refuses_what_json_lacks() -> None:
    assert len({canonical_json(v) for v in (1, 1.0, "1", True, None, [1], {"1": 1})}) == 7
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))
