"""Conversations to distill on: which teacher answers, what is the prompt, and rows of the data's and the student's words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.distill_rows import load_conversations, own_rows, sampled_row
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.tokens.batch import batch_rows

RENDERER = Renderer(character_tokenizer("0123456789+="), "test")


def file_of(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def talk(*texts: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **fields}


def test_the_domain_chooses_the_teacher_and_the_one_without_takes_the_rest(tmp_path: Path) -> None:
    path = file_of(tmp_path, talk("1", "2", domain="math"), talk("3", "4", domain="code"), talk("5", "6"))
    found = load_conversations(path, {"math": 0, None: 1})
    assert [c.teacher for c in found.examples] == [0, 1, 1]
    assert [c.teacher for c in load_conversations(path, {None: 0}).examples] == [0, 0, 0]
    assert [c.teacher for c in load_conversations(path, {}).examples] == [0, 0, 0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (talk("1", "2", domain="law"), ("rows.jsonl:2", "the domain 'law'", "are code, math", "add a teacher")),
        (talk("1", "2"), ("rows.jsonl:2", "has no `domain`", "code, math")),
        (talk("1", "2", domain=3), ("rows.jsonl:2", "domain: must be text, got int")),
    ],
)
def test_a_row_without_a_teacher_is_named(tmp_path: Path, row: object, words: tuple[str, ...]) -> None:
    path = file_of(tmp_path, talk("1", "2", domain="math"), row)
    with pytest.raises(InputError) as caught:
        load_conversations(path, {"math": 0, "code": 1})
    for word in words:
        assert word in str(caught.value)


def test_the_prompt_is_what_comes_before_the_last_response(tmp_path: Path) -> None:
    path = file_of(tmp_path, talk("1", "2", "3", "4"), talk("1", "2", "3"), talk("1"))
    examples = load_conversations(path, {}).examples
    assert [[m.content for m in c.prompt] for c in examples] == [["1", "2", "3"], ["1", "2", "3"], ["1"]]
    assert [c.has_response for c in examples] == [True, True, False]


def test_own_and_sampled_rows_make_one_batch_with_numbers_of_their_own(tmp_path: Path) -> None:
    path = file_of(tmp_path, talk("1+2=", "3", domain="math"), talk("4"), talk("5=", "5"))
    examples = load_conversations(path, {"math": 1, None: 0}).examples
    own = own_rows(examples, RENDERER, max_tokens=32, first=2)
    prompt = RENDERER.prompt_ids(examples[0].prompt)
    new = sampled_row(prompt, (7, RENDERER.end_of_turn_id), (-0.5, -0.1), version=3, number=0, teacher=1)
    batch = batch_rows([new, *own.rows])
    assert own.dropped_untrained == 1
    assert batch.group_id.tolist() == [0, 2, 4] and batch.prompt_id.unique().numel() == 3
    assert batch.columns["teacher"].tolist() == [1, 1, 0] and batch.columns["sampled"].tolist() == [1, 0, 0]
    assert batch.loss_mask[: len(prompt) + 2].tolist() == [False] * len(prompt) + [True, True]
    assert batch.version[: len(prompt) + 2].tolist() == [-1] * len(prompt) + [3, 3]
    assert tuple(own.rows[0].tokens[: len(prompt)]) == prompt
