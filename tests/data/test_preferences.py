"""Laws of reading preferences: every form of row, and every fault with file, line, field and fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import Message, assistant, user
from nemo_rl_like.data.preferences import load_judged, load_pairs, unpaired

U = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
JUDGED = {"prompt": "q", "completion": "good", "label": True}


def file(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": [U], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": [U, GOOD], "rejected": [U, BAD]},
        {"chosen": [U, GOOD], "rejected": [U, BAD]},
    ],
    ids=["texts", "messages", "prompt repeated", "prompt implied"],
)
def test_every_form_of_a_pair_says_the_same(tmp_path: Path, row: dict[str, Any]) -> None:
    (pair,) = load_pairs(file(tmp_path, row)).examples
    assert (pair.prompt, pair.chosen, pair.rejected) == ((user("q"),), (assistant("good"),), (assistant("bad"),))
    assert pair.margin is None and pair.where.endswith("data.jsonl:1")


def test_an_implied_prompt_is_all_that_both_begin_with(tmp_path: Path) -> None:
    start = [{"role": "system", "content": "s"}, U, GOOD, {"role": "user", "content": "more"}]
    (pair,) = load_pairs(file(tmp_path, {"chosen": [*start, GOOD], "rejected": [*start, BAD]})).examples
    assert len(pair.prompt) == 4 and pair.chosen == (assistant("good"),)


def test_a_completion_may_have_several_turns(tmp_path: Path) -> None:
    turns = [GOOD, {"role": "user", "content": "more"}, GOOD]
    (pair,) = load_pairs(file(tmp_path, {"prompt": "q", "chosen": turns, "rejected": [BAD]})).examples
    assert [m.role for m in pair.chosen] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("text", ":2: must be an object like .*chosen"),
        ({"prompt": "q", "chosen": "a"}, r":2: has no `rejected`, its keys are \['chosen', 'prompt'\]; write"),
        (JUDGED, r":2: has no `chosen`.*are for `losses: \[kto\]`"),
        ({**PAIR, "chosen": "bad"}, ":2: `chosen` and `rejected` are equal.*remove the line"),
        ({**PAIR, "chosen": 5}, ":2: chosen: must be text or a list of messages, got int"),
        ({**PAIR, "chosen": []}, ":2: chosen: has no message"),
        ({**PAIR, "chosen": [{"role": "assistant"}]}, r":2: chosen\[0\].content: must be text"),
        (
            {**PAIR, "chosen": [{"role": "user", "content": "x"}, GOOD]},
            ":2: chosen: begins with role user; .*leave `prompt` out",
        ),
        ({**PAIR, "chosen": [U]}, ":2: chosen: ends with the prompt"),
        ({"chosen": "a", "rejected": "b"}, ":2: has no `prompt`; give one, or write"),
        ({"chosen": [GOOD], "rejected": [BAD]}, ":2: `chosen` and `rejected` begin with different messages"),
        ({**PAIR, "margin": "much"}, ":2: margin: is 'much', must be a number"),
        ({**PAIR, "margin": True}, ":2: margin: is True"),
        ({**PAIR, "margin": 1.5}, ":1: has no `margin`, but other lines have one"),
    ],
)
def test_a_bad_pair_names_file_line_and_fix(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(InputError, match=r"data\.jsonl" + said):
        load_pairs(file(tmp_path, PAIR, row))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (PAIR, ":2: has no `completion`.*`data.unpair: true`"),
        ({**JUDGED, "label": 1}, ":2: label: is 1, must be true"),
        ({**JUDGED, "label": "good"}, ":2: label: is 'good'"),
        ({"completion": "a", "label": True}, ":2: has no `prompt`"),
    ],
)
def test_a_bad_judgement_names_file_line_and_fix(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(InputError, match=r"data\.jsonl" + said):
        load_judged(file(tmp_path, JUDGED, row))


def test_pairs_become_judged_completions_on_request(tmp_path: Path) -> None:
    path = file(tmp_path, PAIR, {**PAIR, "prompt": "r"})
    data = load_judged(path, unpair=True)
    assert data.examples == unpaired(load_pairs(path).examples)
    assert [(e.prompt[0].content, e.completion[0].content, e.desirable) for e in data.examples] == [
        ("q", "good", True),
        ("q", "bad", False),
        ("r", "good", True),
        ("r", "bad", False),
    ]


def test_judged_rows_are_read(tmp_path: Path) -> None:
    (first, second) = load_judged(file(tmp_path, JUDGED, {**JUDGED, "prompt": [U], "label": False})).examples
    assert first.prompt == second.prompt == (Message("user", "q"),)
    assert (first.desirable, second.desirable) == (True, False)


def test_the_hash_follows_content_and_order(tmp_path: Path) -> None:
    other = {**PAIR, "chosen": "better"}
    first = load_pairs(file(tmp_path, PAIR, other)).sha256
    assert load_pairs(file(tmp_path, {"chosen": [U, GOOD], "rejected": [U, BAD]}, other)).sha256 == first
    assert load_pairs(file(tmp_path, other, PAIR)).sha256 != first
    assert load_pairs(file(tmp_path, {**PAIR, "margin": 1}, {**other, "margin": 1})).sha256 != first


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="empty"):
        load_pairs(file(tmp_path))
    with pytest.raises(InputError, match="no such file"):
        load_judged(tmp_path / "none.jsonl")
