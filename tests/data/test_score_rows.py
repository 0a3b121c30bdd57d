"""Laws of a reward model's rows: where scores are read, what is left out, and how training and rollouts agree on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import assistant, user
from nemo_rl_like.data.preferences import Pair
from nemo_rl_like.data.ratings import Rated, Stepwise, load_rated, load_stepwise
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.score_rows import pair_score_rows, rated_rows, stepwise_rows
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.tokens.batch import Row, batch_rows
from tests.data import small_tokenizers as small

CHARS = Renderer(character_tokenizer("0123456789+=;"), "test")


def read_after(row: Row, renderer: Renderer = CHARS) -> list[str]:
    """The text up to each place that is scored."""
    return [renderer.decode(list(row.tokens[:i])) for i, m in enumerate(row.loss_mask) if m]


def solution(*steps: str) -> Stepwise:
    return Stepwise((user("1+1+1="),), steps, tuple(float(i % 2) for i in range(len(steps))), "data.jsonl:1")


def test_a_pair_is_scored_at_the_end_token_of_each_side_and_shares_its_prompt() -> None:
    pairs = [Pair((user("1+2="),), (assistant("3"),), (assistant("44"),), 0.5, "data.jsonl:1")]
    rows = pair_score_rows(pairs, CHARS, max_tokens=20).rows
    assert [read_after(row)[0].endswith(text) for row, text in zip(rows, ("3<eos>", "44<eos>"), strict=True)] == [
        True
    ] * 2
    assert [len(read_after(row)) for row in rows] == [1, 1]
    assert [row.columns for row in rows] == [{"chosen": 1.0, "margin": 0.5}, {"chosen": 0.0, "margin": 0.5}]
    assert rows[0].prompt_id == rows[1].prompt_id and rows[0].group_id == rows[1].group_id
    batch_rows(rows)


def test_what_a_template_writes_behind_the_end_token_is_not_read() -> None:
    renderer = Renderer(small.bpe_tokenizer(small.CHATML), "test")
    (row,) = rated_rows([Rated((user("hi"),), (assistant("yes"),), 2.5, "x:1")], renderer, max_tokens=200).rows
    assert row.tokens[-2] == renderer.end_of_turn_id and row.loss_mask[-1] and sum(row.loss_mask) == 1
    assert row.extras["target"][-1] == 2.5


def test_steps_are_scored_at_their_separators_and_the_end() -> None:
    (row,) = stepwise_rows([solution("1+1=2", "2+1=3", "3")], CHARS, separator=";", max_tokens=60).rows
    texts = read_after(row)
    assert [text[-6:] for text in texts[:2]] == ["+1=2;"[-6:].rjust(6, "1")[-6:], "2+1=3;"]
    assert texts[2].endswith("3<eos>")
    assert [row.extras["target"][i] for i, m in enumerate(row.loss_mask) if m] == [0.0, 1.0, 0.0]


def test_separators_in_the_prompt_are_no_steps() -> None:
    example = Stepwise((user("1;2;"),), ("3",), (1.0,), "x:1")
    (row,) = stepwise_rows([example], CHARS, separator=";", max_tokens=60).rows
    assert len(read_after(row)) == 1


def test_what_is_too_long_or_says_nothing_is_left_out_and_counted() -> None:
    long = Rated((user("1"),), (assistant("1" * 30),), 1.0, "x:1")
    made = rated_rows([long, Rated((user("1"),), (assistant("2"),), 1.0, "x:2")], CHARS, max_tokens=20)
    assert len(made.rows) == 1 and made.dropped_too_long == 1
    room = len(made.rows[0].tokens)
    assert rated_rows([Rated((user("1"),), (assistant("2"),), 1.0, "x:2")], CHARS, max_tokens=room).rows
    assert not rated_rows([Rated((user("1"),), (assistant("2"),), 1.0, "x:2")], CHARS, max_tokens=room - 1).rows
    with pytest.raises(InputError, match="x:1"):
        rated_rows([long], CHARS, max_tokens=20, too_long="refuse")


def written(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_ratings_and_steps_are_read_line_by_line(tmp_path: Path) -> None:
    (rated,) = load_rated(written(tmp_path, {"prompt": "1+1=", "completion": "2", "score": 3})).examples
    assert (rated.completion, rated.score, rated.where.endswith("rows.jsonl:1")) == ((assistant("2"),), 3.0, True)
    row = {"prompt": "1+1=", "completions": ["a", "b"], "labels": [True, 0.25]}
    (steps,) = load_stepwise(written(tmp_path, row), "\n").examples
    assert (steps.labels, steps.completion("\n")) == ((1.0, 0.25), (assistant("a\nb"),))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, ("rows.jsonl:1", "`completion`", "loss: pairwise")),
        ({"prompt": "p", "completion": "a", "score": "good"}, ("rows.jsonl:1", "score", "'good'", "number")),
        ({"prompt": "p", "completion": "a", "score": True}, ("score", "True")),
    ],
)
def test_a_rating_that_does_not_fit_is_refused_by_line(tmp_path: Path, row: object, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        load_rated(written(tmp_path, row))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("completions", "labels", "words"),
    [
        (["a"], [True, False], ("1 `completions`", "2 `labels`")),
        ([], [], ("completions", "at least one")),
        (["a\nb"], [True], ("completions[0]", "'\\n'", "loss.separator")),
        (["a", ""], [True, True], ("completions[1]", "not empty")),
        (["a"], [2], ("labels[0]", "from 0 to 1")),
        (["a"], ["yes"], ("labels[0]", "'yes'")),
    ],
)
def test_steps_that_do_not_fit_are_refused_by_line(
    tmp_path: Path, completions: object, labels: object, words: tuple[str, ...]
) -> None:
    row = {"prompt": "p", "completions": completions, "labels": labels}
    with pytest.raises(InputError) as error:
        load_stepwise(written(tmp_path, row), "\n")
    assert all(word in str(error.value) for word in ("rows.jsonl:1", *words)), error.value


def test_a_tokenizer_that_hides_a_separator_is_told() -> None:
    renderer = Renderer(small.bpe_tokenizer(small.CHATML), "test")
    example = Stepwise((user("hi"),), ("ab", "cd"), (1.0, 0.0), "x:1")
    (row,) = stepwise_rows([example], renderer, separator="\n", max_tokens=200).rows
    assert sum(row.loss_mask) == 2
    with pytest.raises(InputError, match=r"x:1.*loss\.separator"):
        stepwise_rows([example], renderer, separator="\nc", max_tokens=200)
