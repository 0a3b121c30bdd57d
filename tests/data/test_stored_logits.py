"""Stored log-probs: read back bit for bit, and refused where they belong to something else or are damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.stored_logits import (
    MANIFEST,
    LogitsOrigin,
    StoredLogits,
    Told,
    extras_of,
    shard_path,
    write_logits,
    write_manifest,
)

ORIGIN = LogitsOrigin("a" * 64, "b" * 64, ("math:" + "c" * 64,), 3, 1.0, 32)
COUNTS = ([2, 0, 3], [1])
"""Trained tokens of the conversations of two shards."""


def written(folder: Path) -> list[Told]:
    """Two shards; what was said of each conversation."""
    draw = torch.Generator().manual_seed(0)
    said = []
    for number, counts in enumerate(COUNTS):
        n = sum(counts)
        told = Told(
            torch.randint(9, (n,), generator=draw, dtype=torch.int32),
            torch.randint(9, (n, 3), generator=draw, dtype=torch.int32),
            -torch.rand(n, 3, generator=draw),
        )
        write_logits(folder, number, told, torch.tensor(counts))
        parts = [x.split(counts) for x in (told.tokens, told.ids, told.logprobs)]
        said += [Told(*(part[i] for part in parts)) for i in range(len(counts))]
    write_manifest(folder, ORIGIN, len(COUNTS), 3)
    return said


def test_every_conversation_comes_back_bit_for_bit(tmp_path: Path) -> None:
    said = written(tmp_path)
    stored = StoredLogits(tmp_path)
    assert stored.origin == ORIGIN
    for index in (3, 0, 2, 1):
        got = stored.of(index)
        for name in ("tokens", "ids", "logprobs"):
            assert torch.equal(getattr(got, name), getattr(said[index], name))
            assert getattr(got, name).dtype == getattr(said[index], name).dtype


def test_a_batch_takes_them_at_its_trained_tokens_only(tmp_path: Path) -> None:
    said = written(tmp_path)
    tokens = torch.cat([torch.tensor([5]), said[2].tokens, torch.tensor([5, 5]), said[0].tokens]).long()
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    got = extras_of([said[2], said[1], said[0]], tokens, mask, "rows.jsonl")
    assert torch.equal(got["teacher_ids"][mask], torch.cat([said[2].ids, said[0].ids]))
    assert torch.equal(got["teacher_logprobs"][mask], torch.cat([said[2].logprobs, said[0].logprobs]))
    assert not got["teacher_logprobs"][~mask].any()
    with pytest.raises(InputError, match=r"rows\.jsonl: the stored log-probs are of other tokens"):
        extras_of([said[2], said[0]], tokens + mask, mask, "rows.jsonl")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"data": "d" * 64}, "data is dddddddddddd here and aaaaaaaaaaaa there"),
        ({"tokenizer": "d" * 64}, "tokenizer is dddddddddddd here and bbbbbbbbbbbb there"),
        ({"teachers": ("math:" + "d" * 64,)}, "teachers is math:dddddddddddd here and math:cccccccccccc there"),
        ({"top_k": 4, "temperature": 2.0}, "top_k is 4 here and 3 there; temperature is 2.0 here and 1.0 there"),
        ({"max_tokens": 64}, "max_tokens is 64 here and 32 there"),
    ],
)
def test_another_origin_is_refused_naming_both(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    replace(ORIGIN, teachers=()).check(ORIGIN, tmp_path)
    with pytest.raises(InputError) as caught:
        replace(ORIGIN, **other).check(ORIGIN, tmp_path)
    assert words in str(caught.value) and "write it anew" in str(caught.value)


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no manifest\.json .* finished `teacher_logits` stage"):
        StoredLogits(tmp_path)
    written(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "format": 9}))
    with pytest.raises(InputError, match="has format 9, and this version reads 1"):
        StoredLogits(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(InputError, match="no manifest of stored log-probs"):
        StoredLogits(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / shard_path(1)).write_bytes(b"short")
    with pytest.raises(InputError, match=r"logits-00001\.safetensors: has 5 bytes, the manifest says"):
        StoredLogits(tmp_path)
