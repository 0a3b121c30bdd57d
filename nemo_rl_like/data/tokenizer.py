"""Tokenizers: a Hugging Face folder, or one made of an alphabet that plain transformers loads like any other."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.artifacts.hashing import hash_json
from nemo_rl_like.spec.model import TokenizerSpec

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
PLAIN_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Contents one after another; the assistant's end with the end token."""
_FILES = ("tokenizer.json", "tokenizer_config.json")


def make_tokenizer(spec: TokenizerSpec) -> PreTrainedTokenizerFast:
    """The tokenizer that the spec describes. Raises SpecError, InputError."""
    if spec.characters is not None:
        return character_tokenizer(spec.characters)
    return load_tokenizer(str(spec.path))


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token a character: ids 0..3 are pad, begin, end and unknown, then the alphabet in the given order.

    Raises SpecError for an empty alphabet or a repeated character.
    """
    twice = sorted({c for c in characters if characters.count(c) > 1})
    if not characters or twice:
        what = f"has {twice[0]!r} more than once" if twice else "is empty"
        raise SpecError(
            f"model.tokenizer.characters: {characters!r} {what}; name each character once, for example '0123456789+='"
        )
    vocabulary = {token: i for i, token in enumerate((PAD, BOS, EOS, UNK, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = PLAIN_CHAT_TEMPLATE
    return made


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder.

    Raises:
        InputError: no such folder, no tokenizer in it, or one that cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"tokenizer: {path}: no such folder; give a Hugging Face folder with {_FILES[0]}")
    for name in _FILES:
        _check_json(path / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"tokenizer: {path}: cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(
            f"tokenizer: {path}: is a {type(tokenizer).__name__}; only fast tokenizers ({_FILES[0]}) are supported"
        )
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerFast, source: str) -> None:
    """Raises InputError when the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise InputError(
            f"tokenizer: {source}: has no chat template, so messages cannot become tokens; put a `chat_template.jinja` into the folder "
            "(an instruct model's own, or the plain one in nemo_rl_like.data.tokenizer.PLAIN_CHAT_TEMPLATE)"
        )


def _check_json(file: Path) -> None:
    if not file.is_file():
        raise InputError(f"tokenizer: {file.parent}: has no {file.name}; copy the tokenizer's files into the folder")
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"tokenizer: {file}: is not valid JSON ({error}); the file is damaged, copy it again"
        ) from error


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash of what makes ids of conversations: vocabulary, chat template, and the ids of special tokens."""
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]
    return hash_json({"vocabulary": tokenizer.get_vocab(), "template": tokenizer.chat_template, "special": special})
