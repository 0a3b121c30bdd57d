"""Byte-level BPE tokenizers from text, by Hugging Face `tokenizers`: any text has tokens, none is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.data.documents import load_documents
from nemo_rl_like.data.tokenizer import PLAIN_CHAT_TEMPLATE

END, PAD = "<|endoftext|>", "<|pad|>"
BYTES = 256


def train_tokenizer(files: Sequence[Path], size: int, folder: Path) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `size` tokens on documents, with end and pad token and the plain chat template, and write it to `folder`.

    The same files give the same tokenizer. See `documents.load_documents` for what a file may be.

    Raises InputError: a file cannot be read, `size` has no room for a merge or more than the text has, or `folder` is not empty.
    """
    least = BYTES + len((END, PAD)) + 1
    if size < least:
        raise InputError(
            f"--size is {size}; a byte-level tokenizer needs at least {least}: {BYTES} bytes, an end and a pad token, and a merge"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--out: {folder} exists and is not an empty folder; give another one")
    trained = _train(load_documents(files).texts, size)
    found = trained.get_vocab_size()
    if found < size:
        raise InputError(
            f"--size is {size}, but the text has pairs for {found} tokens only; give more text, or --size {found}"
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    made.chat_template = PLAIN_CHAT_TEMPLATE
    made.save_pretrained(str(folder))
    return made


def _train(texts: Sequence[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
