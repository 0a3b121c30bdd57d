"""Laws of rendering: sampled ids are never re-encoded, and a longer conversation only ever appends or says that it does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.messages import Message, Tool, assistant, user
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import character_tokenizer
from tests.data import small_tokenizers as small

CHATML = Renderer(small.bpe_tokenizer(), "test")
WORDS = st.text(alphabet="ab heloword\n12+=?", min_size=1, max_size=30)


def _renderer(template: str) -> Renderer:
    return Renderer(small.bpe_tokenizer(template), "test")


@given(prompt=WORDS, answers=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), odd=st.booleans())
def test_a_next_turn_appends_to_the_exact_ids_and_reads_as_the_whole_render(prompt, answers, odd):
    messages = [user(prompt)]
    ids = list(CHATML.prompt_ids(messages))
    for said, new in answers:
        sampled = _one_id_a_character(said) if odd else list(CHATML.tokenizer(said, add_special_tokens=False).input_ids)
        ids += [*sampled, CHATML.end_of_turn_id]
        reply = CHATML.reply([*sampled, CHATML.end_of_turn_id])
        appended = CHATML.next_turn_ids(messages, reply, ids, [Message("tool", new)])
        assert appended is not None
        messages += [reply, Message("tool", new)]
        ids += appended
        assert CHATML.decode(ids) == CHATML.text(messages, answer_next=True)


def _one_id_a_character(text: str) -> list[int]:
    """Ids that spell the text but that the tokenizer itself would not choose."""
    return [i for c in text for i in CHATML.tokenizer(c, add_special_tokens=False).input_ids]


def test_a_template_that_rewrites_history_asks_for_a_new_segment():
    renderer = _renderer(small.FORGETS_THOUGHTS)
    before, reply = [user("sum?")], assistant("<think>hm</think>46")
    ids = [5, renderer.end_of_turn_id]
    assert renderer.next_turn_ids(before, reply, ids, [user("and?")]) is None
    assert renderer.next_turn_ids(before, assistant("46"), ids, [user("and?")]) is not None


def test_history_that_is_rewritten_at_equal_length_is_noticed():
    renderer = _renderer(small.SHOUTS)
    ids = [5, renderer.end_of_turn_id]
    assert renderer.next_turn_ids([user("a")], assistant("hello"), ids, [user("b")]) is None
    assert renderer.next_turn_ids([user("a")], assistant("46"), ids, [user("b")]) is not None


def test_a_template_that_trims_content_asks_for_a_new_segment_only_where_it_matters():
    renderer = _renderer(small.TRIMMING)
    ids = [5, renderer.end_of_turn_id]
    assert renderer.next_turn_ids([user("a")], assistant(" 46"), ids, [user("b")]) is None
    assert renderer.next_turn_ids([user("a")], assistant("46"), ids, [user("b")]) is not None


def test_a_turn_that_did_not_end_with_the_templates_token_asks_for_a_new_segment():
    other = CHATML.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert CHATML.next_turn_ids([user("a")], assistant("46"), [5, other], [user("b")]) is None


def test_the_begin_token_stands_once_and_twice_is_refused():
    ids = _renderer(small.WITH_BOS).prompt_ids([user("hello")])
    bos = CHATML.tokenizer.bos_token_id
    assert ids.count(bos) == 1
    with pytest.raises(InputError, match="begin token twice"):
        _renderer(small.TWO_BOS).prompt_ids([user("hello")])


def test_a_character_outside_the_alphabet_is_refused_not_replaced():
    renderer = Renderer(character_tokenizer("0123456789+="), "test")
    with pytest.raises(InputError, match="does not know a character of '<bos>1x2='"):
        renderer.prompt_ids([user("1x2=")])


def test_a_role_that_the_template_refuses_is_an_input_error():
    with pytest.raises(InputError, match="roles system, user: no system role"):
        _renderer(small.ALTERNATING).prompt_ids([Message("system", "be brief"), user("hi")])


def test_tools_reach_the_template_as_json_schema():
    renderer = _renderer("{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}" + small.CHATML)
    tool = Tool("calculator", "adds", {"type": "object"})
    assert renderer.text([user("a")], [tool], answer_next=True).startswith("calculator <|im_start|>user")


@given(
    turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), WORDS), min_size=1, max_size=6),
)
def test_exactly_the_assistants_text_and_its_end_are_trained(turns):
    messages = [user("start"), *(Message(role, text) for role, text in turns)]
    rows = CHATML.trained_texts(messages)
    trained = [CHATML.decode([i for i, m in zip(row.ids, row.mask, strict=True) if m]) for row in rows]
    said = [m.content for m in messages if m.role == "assistant"]
    assert "".join(trained) == "".join(f"{text}<|im_end|>" for text in said)
    assert len(rows) == (1 if said else 0)


@given(prompt=WORDS, answer=WORDS)
def test_the_supervised_prompt_is_token_for_token_the_sampling_prompt(prompt, answer):
    (row,) = CHATML.trained_texts([user(prompt), assistant(answer)])
    start = row.mask.index(True)
    assert row.ids[:start] == CHATML.prompt_ids([user(prompt)])


def test_merges_over_the_boundary_do_not_move_it():
    """`hello` is one token in the whole text; the prompt still ends before the answer."""
    renderer = _renderer(
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    whole = renderer.tokenizer("hello<|im_end|>", add_special_tokens=False).input_ids
    (row,) = renderer.trained_texts([user("hel"), assistant("lo")])
    assert list(row.ids) != whole
    assert renderer.decode([i for i, m in zip(row.ids, row.mask, strict=True) if m]) == "lo<|im_end|>"


def test_a_template_that_rewrites_history_makes_one_row_for_each_answer():
    renderer = _renderer(small.FORGETS_THOUGHTS)
    messages = [user("a"), assistant("<think>hm</think>1"), user("b"), assistant("<think>ho</think>2")]
    rows = renderer.trained_texts(messages)
    trained = [renderer.decode([i for i, m in zip(r.ids, r.mask, strict=True) if m]) for r in rows]
    assert trained == ["<think>hm</think>1<|im_end|>", "<think>ho</think>2<|im_end|>"]
    assert "hm" not in renderer.decode(rows[1].ids)


def test_a_template_whose_prompt_is_not_how_it_writes_answers_is_refused_for_training():
    with pytest.raises(InputError, match="finished text starts with its prompt"):
        _renderer(small.THINK_PROMPT).trained_texts([user("a"), assistant("b")])
