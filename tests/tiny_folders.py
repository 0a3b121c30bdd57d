"""Tiny random models as Hugging Face folders, for tests that train one or read one from disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM


def save_llama(
    folder: Path, vocab: int, *, layers: int = 2, positions: int = 64, tied: bool = True, head_dim: int = 8
) -> Path:
    """Write a Llama of width 32, 4 query and 2 key/value heads. vLLM on the CPU wants heads of width 32."""
    torch.manual_seed(0)
    shape = _shape(vocab, layers, positions, tied)
    LlamaForCausalLM(LlamaConfig(**shape, head_dim=head_dim, initializer_range=0.1)).save_pretrained(folder)
    return folder


def save_biased_qwen2(folder: Path, vocab: int) -> Path:
    """Write an untied Qwen2 of the same width, whose projections have biases, with none of them 0."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**_shape(vocab, 2, 64, tied=False)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def _shape(vocab: int, layers: int, positions: int, tied: bool) -> dict[str, int | bool]:
    return {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
    }
