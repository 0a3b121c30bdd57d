"""Files of documents, and tokenizers trained on them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.document_ids import document_ids
from nemo_rl_like.data.documents import load_documents
from nemo_rl_like.data.messages import assistant, user
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import character_tokenizer, load_tokenizer
from nemo_rl_like.data.tokenizer_training import train_tokenizer
from tests.data.small_tokenizers import bpe_tokenizer

TEXT = "the cat sat on the mat\n  and the hat\n \n\nthe dog ran to the cat\n\n\n"


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_blank_lines_part_plain_text_and_lines_are_documents_of_jsonl(tmp_path: Path) -> None:
    plain = written(tmp_path, "a.txt", TEXT)
    lines = written(tmp_path, "b.jsonl", json.dumps({"body": "x\n\ny"}) + "\n\n" + json.dumps({"body": " "}) + "\n")
    found = load_documents([plain, lines], "body")
    assert found.texts == ("the cat sat on the mat\n  and the hat", "the dog ran to the cat", "x\n\ny")
    assert found.sha256 != load_documents([lines, plain], "body").sha256


def test_a_folder_of_nemo_curators_writers_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    """`JsonlWriter` and `ParquetWriter` (NeMo Curator 1.4) write a file a batch, named by a hash, by pandas' `to_json(lines=True, orient="records")` and `to_parquet`."""
    rows = pandas.DataFrame({"text": ["a\n\nb/ü", "c"], "id": ["doc-0", "doc-1"], "quality_score": [0.5, None]})
    rows.to_json(tmp_path / "9f8e.jsonl", lines=True, orient="records")
    rows.to_json(tmp_path / "1a2b.jsonl.gz", lines=True, orient="records", compression="gzip")
    rows.to_parquet(tmp_path / "c3d4.parquet", index=False)
    (tmp_path / "_SUCCESS").write_text("")
    assert load_documents([tmp_path]).texts == ("a\n\nb/ü", "c") * 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: the folder has no file of rows"):
        load_documents([tmp_path / "empty"])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", " \n\n", "a.txt: has no document"),
        ("a.jsonl", "", "a.jsonl: the dataset is empty"),
        ("a.jsonl", '{"text": " "}\n', "a.jsonl: has no document"),
        ("a.jsonl", '{"text": "x"}\n{"body": "y"}\n', r"a.jsonl:2: has no text in 'text'; it has \['body'\]"),
        ("a.jsonl", '["x"]\n', "a.jsonl:1: has no text"),
    ],
)
def test_files_without_documents_are_told_by_name_and_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_documents([written(tmp_path, name, text)])
    with pytest.raises(InputError, match="none.txt: no such file"):
        load_documents([tmp_path / "none.txt"])


def test_documents_end_with_the_end_token_and_unknown_characters_are_refused() -> None:
    tokenizer = character_tokenizer("0123456789+=")
    (ids,) = document_ids(["1+2=3"], tokenizer, "t")
    assert tokenizer.decode(list(ids)) == "1+2=3<eos>"
    with pytest.raises(InputError, match="t: document 2 has a character that the tokenizer does not know: '1x'"):
        document_ids(["1", "1x"], tokenizer, "t")
    endless = bpe_tokenizer()
    endless.eos_token = None
    with pytest.raises(InputError, match="has no end token"):
        document_ids(["1"], endless, "t")


def test_a_trained_tokenizer_loads_like_any_other_and_reads_any_text(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", TEXT * 3)
    assert len(train_tokenizer([file], 270, tmp_path / "t")) == 270
    tokenizer = load_tokenizer(tmp_path / "t")
    assert len(tokenizer) == 270 and tokenizer.eos_token_id != tokenizer.pad_token_id
    for text in ("the cat", "Ünïcode 🎉\n\ttabs", " <tag> "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert len(tokenizer("the cat", add_special_tokens=False).input_ids) < len("the cat")
    renderer = Renderer.load(tmp_path / "t")
    (row,) = renderer.trained_texts([user("the cat"), assistant("sat")])
    assert renderer.decode(row.ids) == "the catsat<|endoftext|>"
    assert row.ids[-1] == tokenizer.eos_token_id and row.mask[-1]


def test_the_same_text_trains_the_same_tokenizer(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", TEXT * 3)
    for name in ("one", "two"):
        train_tokenizer([file], 270, tmp_path / name)
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()


def test_sizes_and_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", TEXT)
    with pytest.raises(InputError, match="--size is 258; a byte-level tokenizer needs at least 259"):
        train_tokenizer([file], 258, tmp_path / "t")
    with pytest.raises(InputError, match=r"--size is 5000, but the text has pairs for \d+ tokens only"):
        train_tokenizer([file], 5000, tmp_path / "t")
    with pytest.raises(InputError, match="is not an empty folder"):
        train_tokenizer([file], 270, tmp_path)
