"""Rows of other systems come to the same conversation as ours, in whatever file they stand, and a malformed one is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.datasets import load_messages
from nemo_rl_like.data.messages import Message
from nemo_rl_like.data.preferences import load_pairs
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.spec.environment import EnvironmentSpec

ASKED, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
OURS = {"messages": [ASKED, ANSWER]}
SAME: dict[str, Any] = {
    "trl_text": {"prompt": "1+1?", "completion": "2"},
    "trl_messages": {"prompt": [ASKED], "completion": [ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
    "nemo_chat": {
        "mask": "User",
        "system": "",
        "conversations": [{"from": "User", "value": "1+1?"}, {"from": "Assistant", "value": "2"}],
    },
    "conversations_of_roles": {"conversations": [ASKED, ANSWER]},
    "alpaca": {"instruction": "1+1?", "input": "", "output": "2"},
    "nemo_rl": {"input": "1+1?", "output": "2"},
}


def write(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", SAME)
def test_a_row_of_another_system_is_the_same_conversation(tmp_path: Path, name: str) -> None:
    ours = load_messages(write(tmp_path / "ours.jsonl", [OURS]))
    theirs = load_messages(write(tmp_path / "theirs.jsonl", [SAME[name]]))
    assert theirs.examples[0].messages == ours.examples[0].messages
    assert theirs.sha256 == ours.sha256


def test_an_alpaca_input_follows_its_instruction_and_a_system_text_leads(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1, 1", "output": "2", "id": 7},
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "hi"}]},
    ]
    one, two = load_messages(write(tmp_path / "x.jsonl", rows)).examples
    assert one.messages[0] == Message("user", "Add.\n\n1, 1") and one.fields == {"id": 7}
    assert [m.role for m in two.messages] == ["system", "user"]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    rows = [
        OURS,
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "weight": 0.5}]},
    ]
    ours = load_messages(write(tmp_path / "ours.jsonl", rows))
    file = tmp_path / f"theirs{ending}"
    if ending == ".parquet":  # a columnar writer fills in nulls: the first row's answer has a weight of None in it
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    elif ending == ".jsonl.gz":
        file.write_bytes(gzip.compress((tmp_path / "ours.jsonl").read_bytes()))
    elif ending == ".json":
        file.write_text(json.dumps(rows))
    else:
        datasets.Dataset.from_list([OURS]).to_json(str(file), lines=True)
        rows = rows[:1]
        ours = load_messages(write(tmp_path / "ours.jsonl", rows))
    assert load_messages(file).sha256 == ours.sha256


def test_a_verl_prompt_has_its_ground_truth_as_label(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "x",
            "prompt": [{"role": "user", "content": f"{n}+1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        }
        for n in range(20)
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    (tmp_path / "reward.py").write_text("def f(prompts, responses, labels=None):\n    return [0.0] * len(responses)\n")
    source = resolve(EnvironmentSpec(prompts=str(tmp_path / "train.parquet"), reward=f"{tmp_path}/reward.py:f"))
    task = source.tasks("train")[0]
    number = int(task.data["messages"][0]["content"].partition("+")[0])
    assert task.data["label"] == str(number + 1)


def test_a_ranked_row_is_a_pair(tmp_path: Path) -> None:
    ranked = {
        "context": [ASKED],
        "completions": [
            {"rank": 1, "completion": [{"role": "assistant", "content": "3"}]},
            {"rank": 0, "completion": [ANSWER]},
        ],
    }
    ours = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    found, wanted = (load_pairs(write(tmp_path / f"{i}.jsonl", [row])) for i, row in enumerate((ranked, ours)))
    assert found.sha256 == wanted.sha256


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"conversations": [{"from": "narrator", "value": "x"}]},
            r"x\.jsonl:1: conversations\[0\]\.from: is 'narrator', must be one of",
        ),
        ({"conversations": "x"}, "conversations: must be a list, got str"),
        ({"conversations": [{"from": "human"}]}, "content: must be text, got NoneType"),
        ({"instruction": 3, "output": "x"}, "instruction: must be text, got int"),
        ({"question": "x"}, r"no row of TRL, ShareGPT.*\['question'\]"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_messages(write(tmp_path / "x.jsonl", [row]))


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 2), (0,)])
def test_a_ranking_that_is_no_pair_is_refused(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    row = {"context": [ASKED], "completions": [{"rank": r, "completion": [ANSWER]} for r in ranks]}
    with pytest.raises(InputError, match="two of different `rank`"):
        load_pairs(write(tmp_path / "x.jsonl", [row]))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", b'{"a": 1}', "must hold a list of rows"),
        ("x.json", b"[1,", "is not valid JSON"),
        ("x.jsonl.gz", b"plain", "no whole gzip file"),
        ("x.parquet", b"no parquet", "no readable Parquet file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        load_messages(tmp_path / name)
