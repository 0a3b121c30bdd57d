"""Laws of reading conversations: every fault names file, line and field."""

import json

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.datasets import load_messages, split_dataset
from nemo_rl_like.data.messages import Message, weight_of


def _file(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_all_three_row_forms_give_the_same_messages(tmp_path):
    message = {"role": "user", "content": "hi"}
    data = load_messages(_file(tmp_path, {"messages": [message], "label": 3}, [message], {**message, "label": "x"}))
    assert [e.messages for e in data.examples] == [(Message("user", "hi"),)] * 3
    assert [dict(e.fields) for e in data.examples] == [{"label": 3}, {}, {"label": "x"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r":2: is not valid JSON"),
        ('"text"', r":2: a row must be an object or a list"),
        ('{"question": "x"}', r":2: has neither `messages` nor .* \['question'\]"),
        ('{"messages": []}', r":2: messages: has no message"),
        ('{"messages": "x"}', r":2: messages: must be a list"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}',
            r":2: messages\[1\].role: is 'bot'",
        ),
        ('{"messages": [{"role": "user", "content": 5}]}', r":2: messages\[0\].content: must be text, got int"),
        ('[{"role": "user"}]', r":2: \[0\].content: must be text, got NoneType"),
        ("[[]]", r":2: \[0\]: must be an object"),
    ],
)
def test_a_malformed_line_names_file_line_and_field(tmp_path, line, said):
    with pytest.raises(InputError, match=r"data\.jsonl" + said):
        load_messages(_file(tmp_path, {"role": "user", "content": "fine"}, line))


def test_an_empty_dataset_is_refused(tmp_path):
    with pytest.raises(InputError, match="empty"):
        load_messages(_file(tmp_path, "", "  "))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_messages(tmp_path / "none.jsonl")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load_messages(tmp_path / "x.jsonl")


def test_the_hash_follows_content_and_order_not_layout(tmp_path):
    a, b = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    first = load_messages(_file(tmp_path, a, b)).sha256
    assert load_messages(_file(tmp_path, '{"content":"a",   "role":"user"}', "", b)).sha256 == first
    assert load_messages(_file(tmp_path, b, a)).sha256 != first
    assert load_messages(_file(tmp_path, a, {**b, "label": 1})).sha256 != first


def test_equal_conversations_stay_on_one_side_of_the_validation_split(tmp_path):
    rows = [{"role": "user", "content": str(i % 20)} for i in range(60)]
    data = load_messages(_file(tmp_path, *rows))
    train, held = split_dataset(data, 0.25, seed=1)
    assert len(held) == 15
    assert len(train) == 45
    assert not {e.messages for e in train} & {e.messages for e in held}


def test_weights_are_read_and_change_the_hash(tmp_path):
    hashes = []
    for weight in (None, 0, 0.5):
        answer = {"role": "assistant", "content": "2", **({} if weight is None else {"weight": weight})}
        path = tmp_path / "d.jsonl"
        path.write_text(json.dumps({"messages": [{"role": "user", "content": "1"}, answer]}))
        data = load_messages(path)
        assert weight_of(data.examples[0].messages[1]) == (1.0 if weight is None else weight)
        hashes.append(data.sha256)
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("role", "weight", "words"),
    [
        ("assistant", -1, r"d.jsonl:1: messages\[0\].weight: is -1, must be a number of 0 or more"),
        ("assistant", True, "is True, must be a number"),
        ("assistant", "much", "is 'much', must be a number"),
        ("user", 1, "stands at a message of the user, but only the assistant's are trained"),
    ],
)
def test_weights_that_do_not_fit_are_told_by_line_and_field(tmp_path, role, weight, words):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": "1", "weight": weight}]}))
    with pytest.raises(InputError, match=words):
        load_messages(path)
