"""Tiny random Hugging Face models of every family, token batches, and what transformers says about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl_like.spec.policy import RouterSpec
from nemo_rl_like.tokens.batch import Row, TokenBatch, batch_rows

VOCAB = 131
"""Odd, so that two tensor-parallel ranks need padding."""
DENSE = ("gemma2", "gemma3_text", "llama", "llama_tied", "mistral", "nemotron", "phi3", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe")
"""Families with experts."""
FAMILIES = (*DENSE, *MIXTURES)
FROM_ONE = ("gemma2", "gemma3_text", "nemotron")
"""Families whose norms multiply by 1 + weight."""
OWN_KEYS = ("mistral", "qwen3_moe")
"""Families with a key and value head for each of the four query heads, the others have two."""
DEEP = ("llama_tied", "qwen3_moe")
"""Families with four layers, which two interleaved stages on each of two ranks share; the others have three."""
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
}
_OWN_KEYS = {"num_key_value_heads": 4}


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose logits depend strongly on every weight: nothing keeps its initial one or zero."""
    torch.manual_seed(seed)
    if family.startswith("llama"):
        tied = {"num_hidden_layers": 4, "tie_word_embeddings": True} if family == "llama_tied" else {}
        model = LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **tied}, head_dim=16))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**{**_SHAPE, **_OWN_KEYS}, head_dim=16, sliding_window=7))
    elif family == "qwen2":
        windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True, **windows))
    elif family == "gemma2":
        caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
        model = Gemma2ForCausalLM(Gemma2Config(**_SHAPE, **caps, head_dim=16, sliding_window=5))
    elif family == "gemma3_text":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        model = Gemma3ForCausalLM(_gemma3(layer_types=kinds, sliding_window=5, query_pre_attn_scalar=24))
    elif family == "nemotron":
        shape = {key: value for key, value in _SHAPE.items() if key != "rms_norm_eps"}
        model = NemotronForCausalLM(NemotronConfig(**shape, head_dim=16))
    elif family == "phi3":
        no_padding = {"pad_token_id": None, "eos_token_id": 1, "partial_rotary_factor": 0.75}
        model = Phi3ForCausalLM(Phi3Config(**_SHAPE, **no_padding))
    elif family == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
        model = MixtralForCausalLM(MixtralConfig(**_SHAPE, head_dim=16, **experts))
    elif family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": False}
        shape = {**_SHAPE, **_OWN_KEYS, "num_hidden_layers": 4}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, head_dim=16, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(0.0 if family in FROM_ONE else 1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def _gemma3(**more: object) -> Gemma3TextConfig:
    """Global positions are stretched, and turn by another base than those within windows."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    shape = {key: value for key, value in _SHAPE.items() if key != "rope_theta"}
    return Gemma3TextConfig(**shape, head_dim=16, rope_parameters=rope, **more)


def hugging_face(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' model of a folder, as its equations say: fused attention leaves out caps, grouped experts know no float64."""
    eager = {"experts_implementation": "eager", "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **eager)


def save_models(folder: Path) -> dict[str, Path]:
    """One Hugging Face folder per family."""
    folders = {}
    for family in FAMILIES:
        folders[family] = folder / family
        make_model(family).save_pretrained(folders[family])
    return folders


def make_batch(prompts: int = 3, samples: int = 3, seed: int = 1, longest: int = 9) -> TokenBatch:
    """Groups of rows with shared prompts and lengths from 1 on; one has an untrained token inside, one none trained."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    rows = []
    for prompt_id in range(prompts):
        prompt = draw(1 + draw(1)[0] % longest)
        for _ in range(samples):
            response = draw(1 + draw(1)[0] % longest)
            mask = [False] * len(prompt) + [True] * len(response)
            if len(response) > 3 and prompt_id == 1:
                mask[len(prompt) + 1] = False
            rows.append(_row(prompt + response, len(prompt), mask, prompt_id, len(rows)))
    first = rows[0]
    blind = first.tokens[: first.prompt_len]
    rows.append(_row([*blind, 5, 6], first.prompt_len, [False] * (len(blind) + 2), first.prompt_id, len(rows)))
    return batch_rows(rows)


def _row(tokens: list[int], prompt_len: int, mask: list[bool], prompt_id: int, episode: int) -> Row:
    return Row(tokens, prompt_len, mask, [0.0] * len(tokens), [-1] * len(tokens), prompt_id, prompt_id, episode)


def token_weights(batch: TokenBatch) -> Tensor:
    """float32 [N] a different weight for each token's log-prob in the test's loss."""
    return torch.randn(batch.tokens.numel(), generator=torch.Generator().manual_seed(7)) / 10


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers says."""

    logprobs: Tensor
    """[N] at trained tokens, 0 elsewhere."""
    gradients: dict[str, Tensor]
    """Of `loss_of`, by Hugging Face name."""


def loss_of(logprobs: Tensor, entropy: Tensor | None, log_norm: Tensor | None, weights: Tensor) -> Tensor:
    """A loss that needs every log-prob, entropy and log-normaliser [M]: sum of weights * (log-prob + 0.3 entropy + 0.02 Z^2)."""
    assert entropy is not None and log_norm is not None
    return ((logprobs + 0.3 * entropy + 0.02 * log_norm.square()) * weights).sum()


def reference(
    folder: Path,
    batch: TokenBatch,
    temperature: float,
    dtype: torch.dtype = torch.float64,
    router: RouterSpec | None = None,
) -> Reference:
    """Log-probs and gradients of one padded-free row after another in transformers; with `router`, of its losses too."""
    model = hugging_face(folder, dtype).train()
    parts, entropies, log_norms = [], [], []
    of_routers = torch.zeros((), dtype=dtype)
    mask = batch.loss_mask
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        row = batch.tokens[start:stop]
        out = model(input_ids=row[None], **({} if router is None else {"output_router_logits": True}))
        logits = out.logits[0, :-1] / temperature
        log_softmax = logits.log_softmax(-1)
        nothing = log_softmax.new_zeros(1)
        parts.append(torch.cat([nothing, log_softmax.gather(1, row[1:, None])[:, 0]]))
        entropies.append(torch.cat([nothing, -(log_softmax.exp() * log_softmax).sum(-1)]))
        log_norms.append(torch.cat([nothing, logits.logsumexp(-1)]))
        scored = mask[start:stop].nonzero().flatten()
        if router is not None and len(scored):
            k = model.config.num_experts_per_tok
            for layer in out.router_logits:
                of_routers = of_routers + router_loss(layer[: int(scored[-1])], k, router) / batch.rows
    flat = torch.cat(parts)
    total = loss_of(
        flat[mask], torch.cat(entropies)[mask], torch.cat(log_norms)[mask], token_weights(batch).to(dtype)[mask]
    )
    (total + of_routers).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Reference(torch.where(mask, flat, 0.0).detach(), as_on_disk(gradients, model.config.model_type))


def router_loss(logits: Tensor, k: int, router: RouterSpec) -> Tensor:
    """The losses of one row and layer from logits [T, E], expert by expert and token by token."""
    tokens, experts = logits.shape
    total = logits.new_zeros(())
    for e in range(experts):
        chose = sum(1 for t in range(tokens) if e in logits[t].topk(k).indices.tolist())
        mean = sum((logits[t].exp() / logits[t].exp().sum())[e] for t in range(tokens)) / tokens
        total = total + router.balance_loss * experts * chose / (k * tokens) * mean
    return total + router.z_loss * sum(logits[t].exp().sum().log() ** 2 for t in range(tokens)) / tokens


def as_on_disk(tensors: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Tensors under the names of files: transformers holds all experts of a layer as one tensor."""
    if model_type not in MIXTURES:
        return tensors
    block = "mlp" if model_type == "qwen3_moe" else "block_sparse_moe"
    gate, up, down = ("gate_proj", "up_proj", "down_proj") if model_type == "qwen3_moe" else ("w1", "w3", "w2")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            found[name.replace(".mlp.gate.", f".{block}.gate.")] = tensor
            continue
        prefix, part = name.split(".mlp.experts.")
        for i, matrix in enumerate(tensor):
            expert = f"{prefix}.{block}.experts.{i}"
            if part == "down_proj":
                found[f"{expert}.{down}.weight"] = matrix
            else:
                found[f"{expert}.{gate}.weight"], found[f"{expert}.{up}.weight"] = matrix.chunk(2)
    return found
