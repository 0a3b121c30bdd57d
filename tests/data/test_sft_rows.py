"""Laws of supervised rows."""

import pytest

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import WeightedMessage, assistant, user
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.sft_rows import sft_rows
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.tokens.batch import batch_rows
from tests.data import small_tokenizers as small

CHARS = Renderer(character_tokenizer("0123456789+="), "test")


def test_the_end_token_is_trained_even_where_pad_is_the_same_token():
    renderer = Renderer(small.bpe_tokenizer(pad="<|im_end|>"), "test")
    (row,) = sft_rows([[user("a"), assistant("b")]], renderer, max_tokens=100).rows
    last_trained = max(i for i, m in enumerate(row.loss_mask) if m)
    assert row.tokens[last_trained] == renderer.tokenizer.pad_token_id == renderer.end_of_turn_id


def test_rows_are_prompt_then_trained_answer_then_end():
    batch = batch_rows(sft_rows([[user("1+2="), assistant("3")]], CHARS, max_tokens=20).rows)
    assert CHARS.decode(batch.tokens.tolist()) == "<bos>1+2=3<eos>"
    assert batch.loss_mask.tolist() == [False] * 5 + [True, True]
    assert batch.prompt_lens.tolist() == [5]


def test_conversations_without_a_token_to_train_are_dropped_and_counted():
    made = sft_rows([[user("1")], [user("1"), assistant("2")]], CHARS, max_tokens=20)
    assert (len(made.rows), made.dropped_untrained, made.dropped_too_long) == (1, 1, 0)
    assert made.rows[0].episode_id == 1


def test_long_conversations_are_dropped_or_refused_and_never_cut():
    conversations = [[user("1+1="), assistant("2")], [user("1" * 30), assistant("2")]]
    made = sft_rows(conversations, CHARS, max_tokens=10)
    assert (len(made.rows), made.dropped_too_long) == (1, 1)
    with pytest.raises(InputError, match="conversation 1 has 33 tokens, more than the context of 10"):
        sft_rows(conversations, CHARS, max_tokens=10, too_long="refuse")


def test_a_first_token_that_nothing_predicts_is_not_trained():
    renderer = Renderer(small.bpe_tokenizer("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"), "test")
    (row,) = sft_rows([[assistant("hello")]], renderer, max_tokens=100).rows
    assert (row.prompt_len, row.loss_mask[0]) == (1, False)
    batch_rows([row])


def test_weights_stand_at_their_messages_tokens_and_a_weight_of_zero_trains_nothing():
    half, never = WeightedMessage("assistant", "2", 0.5), WeightedMessage("assistant", "4", 0.0)
    made = sft_rows([[user("1+1="), half, user("2+2="), never, user("3+3="), assistant("6")]], CHARS, max_tokens=40)
    batch = batch_rows(made.rows)
    assert CHARS.decode(batch.tokens.tolist()) == "<bos>1+1=2<eos>2+2=4<eos>3+3=6<eos>"
    assert batch.extras["weight"].tolist() == [0.0] * 5 + [0.5] * 2 + [0.0] * 10 + [1.0] * 2
    assert batch.loss_mask.tolist() == [False] * 5 + [True] * 2 + [False] * 10 + [True] * 2
    assert sft_rows([[user("1"), WeightedMessage("assistant", "2", 0.0)]], CHARS, max_tokens=9).dropped_untrained == 1


def test_a_template_that_rewrites_history_keeps_each_messages_weight():
    renderer = Renderer(small.bpe_tokenizer(small.FORGETS_THOUGHTS), "test")
    turns = [user("a"), WeightedMessage("assistant", "x</think>b", 0.25), user("c"), assistant("d")]
    batch = batch_rows(sft_rows([turns], renderer, max_tokens=200).rows)
    assert batch.rows == 2
    found = [set(batch.select([i]).extras["weight"].tolist()) for i in range(2)]
    assert found == [{0.0, 0.25}, {0.0, 1.0}]


def test_rows_without_weights_have_no_extra():
    assert not sft_rows([[user("1+2="), assistant("3")]], CHARS, max_tokens=20).rows[0].extras
