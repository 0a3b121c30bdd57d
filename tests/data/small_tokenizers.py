"""Small real tokenizers for tests: a byte-level BPE with merges, under several chat templates."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOUTS = FORGETS_THOUGHTS.replace(".split('</think>')[-1]", " | upper")
WITH_BOS = "{{ bos_token }}" + CHATML
TWO_BOS = "{{ bos_token }}" + WITH_BOS
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
THINK_PROMPT = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}")
ALTERNATING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML

_TEXT = [
    "system user assistant tool what is the sum of 12 and 34 ? the answer is 46 .",
    "aaaa aaab aabb abbb bbbb abab baba hello world\n hello\n\n world",
    "<think> the user asks for the sum </think> 46",
]


@cache
def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 5, trainer)
    return tokenizer


def bpe_tokenizer(template: str | None = CHATML, *, pad: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose merges cross word boundaries, with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained().to_str()),
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer
