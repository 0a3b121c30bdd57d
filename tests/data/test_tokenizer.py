"""Laws of tokenizers: what we make, plain transformers loads; what cannot be used says why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import character_tokenizer, load_tokenizer, make_tokenizer
from nemo_rl_like.spec.model import TokenizerSpec
from tests.data.small_tokenizers import NO_END, bpe_tokenizer

ALPHABET = "0123456789+-= \n"


@given(text=st.text(alphabet=ALPHABET))
def test_characters_survive_the_round_trip_one_token_each(text):
    tokenizer = character_tokenizer(ALPHABET)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_plain_transformers_loads_the_saved_tokenizer_and_agrees(tmp_path):
    made = make_tokenizer(TokenizerSpec(characters=ALPHABET))
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
    text = loaded.apply_chat_template(messages, tokenize=False)
    assert text == "<bos>12+34=46<eos>"
    assert loaded(text, add_special_tokens=False).input_ids == made(text, add_special_tokens=False).input_ids
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    assert len(loaded) == 4 + len(ALPHABET)


def test_an_alphabet_with_a_repeated_character_is_refused():
    with pytest.raises(SpecError, match="'1' more than once"):
        character_tokenizer("0121")
    with pytest.raises(SpecError, match="is empty"):
        character_tokenizer("")


def test_a_tokenizer_without_chat_template_is_refused_with_the_fix(tmp_path):
    bpe_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no chat template.*chat_template\.jinja"):
        Renderer.load(tmp_path)


def test_a_template_that_teaches_no_stop_is_refused(tmp_path):
    bpe_tokenizer(NO_END).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no special token"):
        Renderer.load(tmp_path)


def test_missing_and_damaged_tokenizers_name_the_file(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    bpe_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(InputError, match=r"tokenizer\.json: is not valid JSON"):
        load_tokenizer(tmp_path)
