"""Laws of preference rows: what is trained, what shares a prompt, what is left out, and kto's partners."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import Message, assistant, user
from nemo_rl_like.data.preference_rows import judged_rows, pair_rows, partners
from nemo_rl_like.data.preferences import Judged, Pair
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.tokens.batch import Row, batch_rows
from tests.data import small_tokenizers as small

CHARS = Renderer(character_tokenizer("0123456789+="), "test")


def pair(prompt: str, chosen: str, rejected: str, margin: float | None = None) -> Pair:
    return Pair((user(prompt),), (assistant(chosen),), (assistant(rejected),), margin, "data.jsonl:1")


def judged(prompt: str, completion: str, desirable: bool = True) -> Judged:
    return Judged((user(prompt),), (assistant(completion),), desirable, f"data.jsonl:{prompt}")


def trained(row: Row, renderer: Renderer = CHARS) -> str:
    return renderer.decode([t for t, m in zip(row.tokens, row.loss_mask, strict=True) if m])


def whole(row: Row) -> str:
    return CHARS.decode(list(row.tokens))


def test_both_completions_are_trained_with_their_end_and_share_the_prompt() -> None:
    rows = pair_rows([pair("1+2=", "3", "44"), pair("1+1=", "2", "3")], CHARS, max_tokens=20).rows
    assert [trained(row) for row in rows] == ["3<eos>", "44<eos>", "2<eos>", "3<eos>"]
    assert [row.group_id for row in rows] == [0, 0, 1, 1]
    assert [row.episode_id for row in rows] == [0, 1, 2, 3]
    assert [row.prompt_id for row in rows] == [0, 0, 1, 1]
    assert [row.columns["chosen"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    batch_rows(rows)


def test_the_assistants_part_of_the_prompt_is_not_trained() -> None:
    prompt = (user("1+1="), assistant("2"), user("+1="))
    (chosen, rejected) = pair_rows(
        [Pair(prompt, (assistant("3"),), (assistant("4"),), None, "x:1")], CHARS, max_tokens=30
    ).rows
    assert (trained(chosen), trained(rejected)) == ("3<eos>", "4<eos>")
    assert chosen.prompt_len == rejected.prompt_len == len(CHARS.prompt_ids(prompt))


def test_what_the_user_says_inside_a_completion_is_not_trained() -> None:
    turns = (assistant("2"), user("+1="), assistant("3"))
    made = pair_rows([Pair((user("1+1="),), turns, (assistant("4"),), None, "x:1")], CHARS, max_tokens=30).rows
    assert trained(made[0]) == "2<eos>3<eos>"


def test_the_end_token_is_trained_once_even_where_pad_is_the_same_token() -> None:
    renderer = Renderer(small.bpe_tokenizer(pad="<|im_end|>"), "test")
    for row in pair_rows([pair("hello", "a", "b")], renderer, max_tokens=100).rows:
        kept = [t for t, m in zip(row.tokens, row.loss_mask, strict=True) if m]
        assert kept[-1] == renderer.tokenizer.pad_token_id and kept.count(kept[-1]) == 1


def test_a_template_that_rewrites_history_gives_one_completion_several_rows() -> None:
    renderer = Renderer(small.bpe_tokenizer(small.FORGETS_THOUGHTS), "test")
    turns = (assistant("<think>a</think>2"), user("more"), assistant("3"))
    made = pair_rows([Pair((user("1"),), turns, (assistant("4"),), None, "x:1")], renderer, max_tokens=100).rows
    assert [row.episode_id for row in made] == [0, 0, 1] and len({row.group_id for row in made}) == 1


def test_margins_become_a_column() -> None:
    rows = pair_rows([pair("1+2=", "3", "4", 1.5)], CHARS, max_tokens=20).rows
    assert [row.columns["margin"] for row in rows] == [1.5, 1.5]


def test_a_pair_with_one_long_completion_is_dropped_whole_or_refused() -> None:
    data = [pair("1+1=", "2", "3" * 30), pair("1+2=", "3", "4")]
    made = pair_rows(data, CHARS, max_tokens=12)
    assert (len(made.rows), made.dropped_too_long) == (2, 1)
    with pytest.raises(InputError, match=r"data.jsonl:1: the conversation has 36 tokens, more than the context of 12"):
        pair_rows(data, CHARS, max_tokens=12, too_long="refuse")


# -- kto


def mismatched(rows: Sequence[Row]) -> list[str]:
    return [whole(row) for row in rows if row.columns["mismatched"]]


def test_each_prompt_gets_the_next_samples_completion_in_the_order_of_the_data() -> None:
    rows = judged_rows([judged("1+", "5"), judged("2+", "6", False), judged("3+", "7")], CHARS, max_tokens=20).rows
    assert [whole(row) for row in rows if not row.columns["mismatched"]] == [
        "<bos>1+5<eos>",
        "<bos>2+6<eos>",
        "<bos>3+7<eos>",
    ]
    assert mismatched(rows) == ["<bos>1+6<eos>", "<bos>2+7<eos>", "<bos>3+5<eos>"]
    assert [row.columns["chosen"] for row in rows if not row.columns["mismatched"]] == [1.0, 0.0, 1.0]
    assert len({row.episode_id for row in rows}) == 6
    assert len({row.prompt_id for row in rows}) == 3


def test_a_completion_of_the_same_prompt_is_no_mismatch() -> None:
    rows = judged_rows([judged("1+", "5"), judged("1+", "6", False), judged("2+", "7")], CHARS, max_tokens=20).rows
    assert mismatched(rows) == ["<bos>1+7<eos>", "<bos>1+7<eos>", "<bos>2+5<eos>"]


@settings(deadline=None)
@given(prompts=st.lists(st.integers(0, 3), min_size=2, max_size=9))
def test_kto_never_pairs_a_completion_with_itself_for_odd_and_even_steps(prompts: list[int]) -> None:
    asked: list[tuple[Message, ...]] = [(user(str(p)),) for p in prompts]
    for index in range(len(asked)):
        found = list(partners(index, asked))
        assert index not in found and all(asked[other] != asked[index] for other in found)
        assert len(found) == sum(p != prompts[index] for p in prompts)


def test_a_partner_that_does_not_fit_the_context_is_passed_over() -> None:
    data = [judged("1+", "5"), judged("2+", "6666666"), judged("33333+", "7")]
    rows = judged_rows(data, CHARS, max_tokens=11).rows
    assert mismatched(rows) == ["<bos>1+6666666<eos>", "<bos>2+7<eos>", "<bos>33333+5<eos>"]
    rows = judged_rows([judged("1+", "5"), judged("222222+", "6"), judged("3+", "777777")], CHARS, max_tokens=10).rows
    assert mismatched(rows)[1] == "<bos>222222+5<eos>"


def test_a_step_of_one_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="all 2 completions of the step have the same prompt.*raise `pairs_per_step`"):
        judged_rows([judged("1+", "5"), judged("1+", "6")], CHARS, max_tokens=20)
