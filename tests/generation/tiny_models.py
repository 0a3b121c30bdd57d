"""Tiny random Hugging Face models for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 67
Q = "model.layers.1.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"


def tiny_llama(*, tied: bool = True, seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    """A random Llama with 4 query heads, 2 key/value heads of width 32; weights large enough to give peaked logits."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    """Write the model as a Hugging Face folder without a tokenizer."""
    model.save_pretrained(folder)
    return folder


def named_weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Copies of the weights by Hugging Face name, without a tied head."""
    tied = model.config.tie_word_embeddings
    return {n: t.detach().clone() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}


def scores(model: LlamaForCausalLM, rows: list[tuple[int, ...]], temperature: float = 1.0) -> list[list[float]]:
    """Log-probs of each row's tokens but the first, at the temperature."""
    out = []
    with torch.inference_mode():
        for row in rows:
            logits = model(torch.tensor([row])).logits[0, :-1].float() / temperature
            out.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist())
    return out
