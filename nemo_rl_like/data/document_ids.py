"""Documents to token ids: the text as it stands, then the end token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from nemo_rl_like.artifacts.errors import InputError

_BATCH = 1024


def document_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, source: str) -> list[array[int]]:
    """int32 ids of each text with the end token behind them; nothing is added before.

    Raises InputError: the tokenizer has no end token, or does not know a character; names the document.
    """
    end, unknown = end_token(tokenizer), tokenizer.unk_token_id
    made: list[array[int]] = []
    for start in range(0, len(texts), _BATCH):
        for ids in tokenizer(list(texts[start : start + _BATCH]), add_special_tokens=False).input_ids:
            if unknown is not None and unknown in ids:
                raise InputError(
                    f"{source}: document {len(made) + 1} has a character that the tokenizer does not know: {texts[len(made)][:80]!r}; "
                    "use another tokenizer (`nrl tokenizer train` makes one that knows all), or change the text"
                )
            made.append(array("i", [*ids, end]))
    return made


def end_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id that ends a document. Raises InputError if there is none."""
    if tokenizer.eos_token_id is None:
        raise InputError(
            "tokenizer: has no end token, which parts documents; set `eos_token` in tokenizer_config.json, or make a tokenizer with "
            "`nrl tokenizer train`"
        )
    return int(tokenizer.eos_token_id)
