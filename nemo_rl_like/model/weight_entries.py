"""The tensors of a model: Hugging Face's names and shapes beside Megatron's names.

Packing: `linear_qkv` is, per key/value head, [its query heads, key, value]; `linear_fc1` is [gate, up]. Files hold those parts as tensors of
their own, or one below the other in one tensor (Phi-3). Tensor parallelism cuts embeddings, `linear_qkv` and each half of `linear_fc1` by
rows, `linear_proj` and `linear_fc2` by columns. Expert parallelism gives each of its ranks an equal run of a layer's experts, which have
tensor-parallel ranks of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from nemo_rl_like.model.hf_config import FFN_PROJECTIONS, QKV_PROJECTIONS, ModelConfig
from nemo_rl_like.model.hf_experts import ExpertsConfig
from nemo_rl_like.model.hf_latent import LatentConfig

Packing = Literal["vocab", "qkv", "gate_up", "rows", "columns", "whole", "experts"]
"""How ranks cut a tensor, and what it is made of; `experts`: along the first axis, by expert-parallel ranks."""
EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
MCORE_EMBEDDING, MCORE_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

ADAPTER = ".lora."
"""In the name of every parameter that belongs to an adapter."""
VIRTUAL = "virtual_tokens."
"""In the name of the parameter that holds virtual tokens."""
PREFIX = "prefix."
"""In the names of the parameters of a layer's prefix."""
BOTTLENECK = "bottleneck."
"""In the names of the parameters of a bottleneck adapter."""


def beside(name: str) -> bool:
    """Whether a Megatron parameter stands beside the model: an adapter, virtual tokens or a prefix."""
    return any(part in name for part in (ADAPTER, f".{VIRTUAL}", f".{PREFIX}", f".{BOTTLENECK}"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron tensor and the Hugging Face tensors it is made of."""

    packing: Packing
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Hugging Face shapes, in the order of `hf`."""
    names: tuple[str, ...]
    """Megatron's name (without the layer's prefix), and its name under Transformer Engine where that differs; `{expert}` stands for the
    expert's number on its rank."""
    layer: int | None = None
    """Global layer index; None outside the layers."""
    expert: int | None = None
    """Global index of the expert within the layer; None outside the experts."""
    fixed: bool = False
    """float32 at any type of the model, and no optimizer trains it."""

    @property
    def of_experts(self) -> bool:
        """Whether other ranks may hold the same part of it than hold the same dense weights."""
        return self.expert is not None or self.packing == "experts"

    @property
    def is_vector(self) -> bool:
        """Whether it is no matrix: a norm, a bias, or one of each expert."""
        return len(self.shapes[0]) - (self.packing == "experts") == 1


def entries_of(config: ModelConfig) -> Iterator[Entry]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield Entry("vocab", (EMBEDDING,), ((vocab, hidden),), (MCORE_EMBEDDING,))
    for layer in range(config.layers):
        yield from _layer_entries(config, layer)
    yield from _norm_entries(config, "model.norm", ("decoder.final_layernorm.",), hidden)
    if config.score_head:
        yield Entry("whole", (SCORE,), ((1, hidden),), (SCORE,))
    elif not config.tie_embeddings:
        yield Entry("vocab", (HEAD,), ((vocab, hidden),), (MCORE_HEAD,))


def _layer_entries(config: ModelConfig, layer: int) -> Iterator[Entry]:
    hidden = config.hidden_size

    def hf(*names: str) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}.{name}" for name in names)

    entry, norm = partial(Entry, layer=layer), partial(_norm_entries, config, layer=layer)
    before_mlp = hf("pre_feedforward_layernorm" if config.traits.post_norms else "post_attention_layernorm")[0]
    yield from norm(hf("input_layernorm")[0], ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"), hidden)
    yield from _attention_entries(config, layer)
    if config.traits.post_norms:
        yield from norm(hf("post_attention_layernorm")[0], ("post_attention_layernorm.",), hidden)
        yield from norm(hf("post_feedforward_layernorm")[0], ("post_mlp_layernorm.",), hidden)
    yield from norm(before_mlp, ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"), hidden)
    if config.has_experts(layer):
        yield from _expert_entries(config, layer)
        return
    dense = config.ffn_shapes(config.intermediate_size)
    gate_up = {f"mlp.{p}": dense[p] for p in config.traits.projections}
    if config.traits.packed:
        gate_up = _one_below_the_other("mlp.gate_up_proj", gate_up)
    weights = hf(*(f"{p}.weight" for p in gate_up))
    packing: Packing = "gate_up" if config.traits.gated else "rows"
    yield entry(packing, weights, tuple(gate_up.values()), ("mlp.linear_fc1.weight",))
    yield entry("columns", hf("mlp.down_proj.weight"), (dense["down_proj"],), ("mlp.linear_fc2.weight",))


def _attention_entries(config: ModelConfig, layer: int) -> Iterator[Entry]:
    """Everything between the norm before attention and what is added after it."""
    matrices = config.projections

    def hf(*names: str) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}.{name}" for name in names)

    entry, norm = partial(Entry, layer=layer), partial(_norm_entries, config, layer=layer)
    if config.latent is not None:
        yield from _latent_entries(config, config.latent, layer)
        return
    qkv = {f"self_attn.{p}": matrices[p] for p in QKV_PROJECTIONS}
    if config.traits.packed:
        qkv = _one_below_the_other("self_attn.qkv_proj", qkv)
    weights = hf(*(f"{p}.weight" for p in qkv))
    yield entry("qkv", weights, tuple(qkv.values()), ("self_attention.linear_qkv.weight",))
    if config.qkv_bias:
        shapes = tuple(shape[:1] for shape in qkv.values())
        yield entry("qkv", hf(*(f"{p}.bias" for p in qkv)), shapes, ("self_attention.linear_qkv.bias",))
    if config.qk_norm:
        for x in "qk":
            yield from norm(hf(f"self_attn.{x}_norm")[0], (f"self_attention.{x}_layernorm.",), config.head_dim)
    out = hf("self_attn.o_proj.weight")
    yield entry("columns", out, (matrices["o_proj"],), ("self_attention.linear_proj.weight",))
    if config.traits.biases:
        shape = (config.hidden_size,)
        yield entry("whole", hf("self_attn.o_proj.bias"), (shape,), ("self_attention.linear_proj.bias",))
    if config.traits.sinks:
        yield entry("rows", hf("self_attn.sinks"), ((config.heads,),), ("self_attention.sinks",))


def _latent_entries(config: ModelConfig, latent: LatentConfig, layer: int) -> Iterator[Entry]:
    """The matrices of latent attention: into the narrow vectors whole on every rank, out of them cut by heads."""
    names: dict[str, tuple[Packing, str]] = {
        "q_proj": ("rows", "linear_q_proj"),
        "q_a_proj": ("whole", "linear_q_down_proj"),
        "q_b_proj": ("rows", "linear_q_up_proj"),
        "kv_a_proj_with_mqa": ("whole", "linear_kv_down_proj"),
        "kv_b_proj": ("rows", "linear_kv_up_proj"),
        "o_proj": ("columns", "linear_proj"),
    }
    widths = {"q_a_proj": ("q", latent.query_rank), "kv_a_proj_with_mqa": ("kv", latent.key_value_rank)}
    prefix = f"model.layers.{layer}.self_attn"
    for name, shape in latent.projections(config.hidden_size, config.heads).items():
        packing, mcore = names[name]
        yield Entry(packing, (f"{prefix}.{name}.weight",), (shape,), (f"self_attention.{mcore}.weight",), layer)
        part, width = widths.get(name, ("", None))
        if width is not None:
            yield from _norm_entries(
                config, f"{prefix}.{part}_a_layernorm", (f"self_attention.{part}_layernorm.",), width, layer
            )


def _norm_entries(
    config: ModelConfig, hf: str, names: tuple[str, ...], width: int, layer: int | None = None
) -> Iterator[Entry]:
    """A norm's weight, and its bias where it has one; `names` are Megatron's without those words."""
    for part in ("weight", "bias") if config.traits.norm == "layer_1p" else ("weight",):
        yield Entry("whole", (f"{hf}.{part}",), ((width,),), tuple(name + part for name in names), layer)


def _one_below_the_other(name: str, matrices: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The one matrix, `name`, that a packed file has in the place of several."""
    shapes = list(matrices.values())
    return {name: (sum(rows for rows, _ in shapes), shapes[0][1])}


def _expert_entries(config: ModelConfig, layer: int) -> Iterator[Entry]:
    experts, names = config.experts, config.traits.experts
    if experts is None or names is None:
        raise ValueError(f"a {config.family} model has no experts")
    gate, up, down = names.projections
    shapes = [config.projections[name] for name in FFN_PROJECTIONS]
    block = f"model.layers.{layer}.{names.block}"
    router = ((experts.count, config.hidden_size),)
    yield Entry("whole", (f"{block}.{names.router}.weight",), router, ("mlp.router.weight",), layer)
    if config.traits.biases:
        bias = (f"{block}.{names.router}.bias",)
        yield Entry("whole", bias, ((experts.count,),), ("mlp.router.bias",), layer)
    if names.bias:
        bias = (f"{block}.gate.e_score_correction_bias",)
        yield Entry("whole", bias, ((experts.count,),), ("mlp.router.score_bias",), layer, fixed=True)
    yield from _shared_entries(config, block, layer)
    if names.stacked:
        yield from _stacked_entries(experts, config.hidden_size, f"{block}.experts", layer)
        return
    for i in range(experts.count):
        hf = tuple(f"{block}.experts.{i}.{x}.weight" for x in (gate, up))
        yield Entry("gate_up", hf, (shapes[0], shapes[1]), _expert_names("linear_fc1"), layer, i)
        yield Entry(
            "columns", (f"{block}.experts.{i}.{down}.weight",), (shapes[2],), _expert_names("linear_fc2"), layer, i
        )


def _shared_entries(config: ModelConfig, block: str, layer: int) -> Iterator[Entry]:
    """The expert of `block` that every token passes, if there is one, and its gate."""
    experts, names = config.experts, config.traits.experts
    if experts is None or names is None or names.shared is None:
        return
    gate, up, down = config.ffn_shapes(experts.shared_width).values()
    hf, mcore = f"{block}.{names.shared}", "mlp.shared_experts"
    into = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
    yield Entry("gate_up", into, (gate, up), (f"{mcore}.linear_fc1.weight",), layer)
    yield Entry("columns", (f"{hf}.down_proj.weight",), (down,), (f"{mcore}.linear_fc2.weight",), layer)
    if names.shared_gate is not None:
        name = (f"{block}.{names.shared_gate}.weight",)
        yield Entry("whole", name, ((1, config.hidden_size),), (f"{mcore}.gate_weight",), layer)


def _stacked_entries(experts: ExpertsConfig, hidden: int, block: str, layer: int) -> Iterator[Entry]:
    """All experts of a layer in one tensor of each kind."""
    both = 2 * experts.width
    shapes = {
        "gate_up": ("gate_up_proj", (hidden, both)),
        "gate_up_bias": ("gate_up_proj_bias", (both,)),
        "down": ("down_proj", (experts.width, hidden)),
        "down_bias": ("down_proj_bias", (hidden,)),
    }
    for mcore, (name, shape) in shapes.items():
        yield Entry("experts", (f"{block}.{name}",), ((experts.count, *shape),), (f"mlp.experts.{mcore}",), layer)


def _expert_names(part: str) -> tuple[str, str]:
    """One expert by itself, and as Transformer Engine's product over all of a rank's experts holds it."""
    return f"mlp.experts.local_experts.{{expert}}.{part}.weight", f"mlp.experts.{part}.weight{{expert}}"
