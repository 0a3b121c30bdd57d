"""Hugging Face names and shapes <-> this rank's Megatron parameters, both ways, at any tensor-, expert- and pipeline-parallel layout.

Packing: `linear_qkv` is, per key/value head, [its query heads, key, value]; `linear_fc1` is [gate, up]. Files hold those parts as tensors of
their own, or one below the other in one tensor (Phi-3). Tensor parallelism cuts
embeddings, `linear_qkv` and each half of `linear_fc1` by rows, `linear_proj` and `linear_fc2` by columns. Expert parallelism gives each of
its ranks an equal run of a layer's experts, which have tensor-parallel ranks of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import FFN_PROJECTIONS, QKV_PROJECTIONS, ModelConfig
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.tensors.packed import Packed

Packing = Literal["vocab", "qkv", "gate_up", "rows", "columns", "whole"]
_EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
_MCORE_EMBEDDING, _MCORE_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

ADAPTER = ".lora."
"""In the name of every parameter that belongs to an adapter."""
_SHARD_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")
"""Attributes that Megatron reads: whether a parameter is a piece, along which dimension, in how many strides."""


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


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a set of Hugging Face keys lacks or has too much."""

    missing: tuple[str, ...]
    """Needed by the model, absent from the keys."""
    unmapped: tuple[str, ...]
    """Present in the keys, without a place in the model."""


class WeightMap:
    """The map for one model shape."""

    def __init__(self, config: ModelConfig, entries: tuple[Entry, ...] | None = None) -> None:
        self._config = config
        self._experts = 1 if config.experts is None else config.experts.count
        self.entries = tuple(_entries(config)) if entries is None else entries
        self._whole = True

    def only(self, keep: Callable[[Entry], bool]) -> WeightMap:
        """The same map of the entries that `keep` says yes to, which leaves all other parameters alone."""
        part = copy(self)
        part.entries, part._whole = tuple(filter(keep, self.entries)), False
        return part

    def owns(self, name: str) -> bool:
        """Whether a Megatron parameter belongs to this map."""
        return ADAPTER not in name

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every Hugging Face tensor of the model, in file order."""
        return {name: shape for entry in self.entries for name, shape in zip(entry.hf, entry.shapes, strict=True)}

    def coverage(self, keys: Sequence[str]) -> Coverage:
        """Compare `keys` with what the model has; a tied head stored a second time and old rotary buffers are allowed."""
        needed, given = self.hf_shapes(), set(keys)
        extra = sorted(k for k in given - needed.keys() if not self._harmless(k))
        return Coverage(tuple(sorted(needed.keys() - given)), tuple(extra))

    def check(self, reader: TensorReader) -> None:
        """Raise InputError unless `reader` has every tensor in its shape, and nothing else; reads no tensor but a tied head."""
        keys = reader.keys()
        coverage = self.coverage(keys)
        if coverage.missing or coverage.unmapped:
            where = reader.source(keys[0]) if keys else "the weights"
            raise InputError(
                f"{where}: the weights do not fit a {self._config.family} model of this config.json; "
                f"missing keys: {list(coverage.missing)}; keys without a place: {list(coverage.unmapped)}"
            )
        for name, shape in self.hf_shapes().items():
            if reader.shape(name) != shape:
                raise InputError(
                    f"{reader.source(name)}: tensor {name} has shape {list(reader.shape(name))}, "
                    f"but config.json asks for {list(shape)}"
                )
        if self._config.tie_embeddings and HEAD in keys and not torch.equal(reader.get(HEAD), reader.get(_EMBEDDING)):
            raise InputError(
                f"{reader.source(HEAD)}: tie_word_embeddings is true, but {HEAD} differs from {_EMBEDDING}; "
                "set tie_word_embeddings to false to keep both"
            )

    def load_hf(self, model: MegatronModel, reader: TensorReader) -> None:
        """Copy this rank's parameters out of `reader`.

        Raises InputError listing the keys that are missing or have no place, or naming a tensor of the wrong shape.
        """
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in self._local_tensors(model, reader):
                parameters[name].copy_(tensor)

    def mark_shards(self, model: MegatronModel) -> None:
        """Tell Megatron which parameters are pieces of a tensor: the gradient norm counts those on every tensor-parallel rank,
        and a tensor that each rank holds whole once. Gradients of experts are summed over the ranks that hold the same ones.

        Megatron marks them where it initialises weights, which `build_model` leaves out.
        """
        parameters = dict(model.named_parameters())
        for name, entry in self.local_entries(model):
            marks = (entry.packing != "whole", 1 if entry.packing == "columns" else 0, 1)
            for mark, value in zip(_SHARD_MARKS, marks, strict=True):
                setattr(parameters[name], mark, value)
            if entry.expert is not None:
                parameters[name].allreduce = not _experts_apart()

    def local_entries(self, model: MegatronModel) -> Iterator[tuple[str, Entry]]:
        """This rank's parameters by name, with what each is made of; a tied embedding's copy on the last stage is one too."""
        present = _names_of(model)
        for entry in self.entries:
            for name in (self._local_name(present, entry), self._tied_copy(model, entry)):
                if name is not None:
                    yield name, entry

    def wholes(self, entry: Entry, local: Tensor) -> list[Tensor]:
        """The whole Hugging Face tensors of which `local` is this rank's part. Collective over the ranks among which they are cut."""
        group = _group_of(entry)
        if group.size() == 1 or entry.packing == "whole":
            return self._split(entry, local)
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local.contiguous(), group=group)
        return self._split(entry, _unshard(entry, shards))

    def local_part(self, entry: Entry, wholes: Sequence[Tensor]) -> Tensor:
        """This rank's part of the parameter that is made of these whole Hugging Face tensors."""
        return _shard(entry, self._merge(entry, wholes), _group_of(entry))

    def scatter_hf(self, model: MegatronModel, reader: TensorReader) -> dict[str, Tensor]:
        """This rank's part of each of `reader`'s tensors (for example Adam moments), by parameter name; new tensors."""
        return {name: tensor.clone() for name, tensor in self._local_tensors(model, reader)}

    def iter_hf(
        self, model: MegatronModel, tensors: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Collective: yields (Hugging Face name, whole tensor on global rank 0, None on the others), one tensor at a time.

        `tensors` replaces the parameters by tensors of the same names and shapes, all of one dtype. Every rank must run the
        iterator to its end.
        """
        source = dict(model.named_parameters()) if tensors is None else tensors
        gather, present = _Gather(source), _names_of(model)
        for entry in self.entries:
            name = self._local_name(present, entry)
            local = None if name is None else _named(source, name)
            full = gather.to_rank_zero(entry, self._leader(entry), local, self._padded_shape(entry))
            parts = [None] * len(entry.hf) if full is None else self._split(entry, full)
            yield from zip(entry.hf, parts, strict=True)

    def iter_shares(self, model: MegatronModel, tensors: Mapping[str, Tensor] | None = None) -> Iterator[Packed]:
        """Collective: yields the tensors of this rank's share of the model.

        Every tensor is in the share of one of the ranks that hold it; shares are of about the same size. `tensors` as in `iter_hf`.
        """
        source = dict(model.named_parameters()) if tensors is None else tensors
        present, shares = _names_of(model), _Shares()
        for entry in self.entries:
            name = self._local_name(present, entry)
            if name is None:
                continue
            local, place = _named(source, name), shares.place_of(entry)
            if place is not None:
                full = _gathered(entry, local.detach(), _group_of(entry), place)
                if full is not None:
                    yield Packed(entry.hf, full, partial(self._split, entry))

    def _local_tensors(self, model: MegatronModel, reader: TensorReader) -> Iterator[tuple[str, Tensor]]:
        self.check(reader)
        filled = set()
        for name, entry in self.local_entries(model):
            filled.add(name)
            yield name, self.local_part(entry, [reader.get(source) for source in entry.hf])
        left = sorted({name for name in _names_of(model) if self.owns(name)} - filled)
        if left and self._whole:
            raise ValueError(f"the weight map has no entry for Megatron's parameters {left}")

    def _merge(self, entry: Entry, parts: Sequence[Tensor]) -> Tensor:
        if entry.packing == "qkv":
            query, key, value = parts if len(parts) == 3 else parts[0].split(self._qkv_rows())
            return pack_qkv(query, key, value, self._config.kv_heads)
        if entry.packing == "gate_up":
            return torch.cat(list(parts))
        if entry.packing == "vocab":
            extra = self._config.padded_vocab(_tp_size()) - self._config.vocab_size
            return torch.cat([parts[0], parts[0].new_zeros(extra, parts[0].shape[1])]) if extra else parts[0]
        return parts[0]

    def _split(self, entry: Entry, full: Tensor) -> list[Tensor]:
        if entry.packing == "qkv":
            apart = unpack_qkv(full, self._config.kv_heads, self._config.heads // self._config.kv_heads)
            return list(apart) if len(entry.hf) == 3 else [torch.cat(apart)]
        if entry.packing == "gate_up":
            return list(full.chunk(len(entry.hf)))
        return [full[: self._config.vocab_size]] if entry.packing == "vocab" else [full]

    def _qkv_rows(self) -> list[int]:
        return [self._config.projections[name][0] for name in QKV_PROJECTIONS]

    def _padded_shape(self, entry: Entry) -> tuple[int, ...]:
        rows = self._config.padded_vocab(_tp_size()) if entry.packing == "vocab" else sum(s[0] for s in entry.shapes)
        return (rows, *entry.shapes[0][1:])

    def _stage_of(self, entry: Entry) -> int:
        """Pipeline stage that holds the tensor (the first one for a tied embedding)."""
        pp = parallel_state.get_pipeline_model_parallel_world_size()
        if entry.layer is not None:
            return entry.layer // len(self._config.layers_of_stage(0, pp))
        return 0 if entry.hf == (_EMBEDDING,) else pp - 1

    def _expert_place(self, entry: Entry) -> tuple[int, int]:
        """Expert-parallel rank that holds the tensor, and the expert's number there; both 0 outside the experts."""
        return divmod(entry.expert or 0, self._experts // _ep_size())

    def _leader(self, entry: Entry) -> int:
        """First of the global ranks that hold the tensor."""
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        first = self._stage_of(entry) * (dist.get_world_size() // stages)
        return first + self._expert_place(entry)[0] * _etp_size()

    def _local_name(self, present: Set[str], entry: Entry) -> str | None:
        """Which of the `present` parameters of this rank's model it is; None where another stage or expert-parallel rank holds it."""
        stage = parallel_state.get_pipeline_model_parallel_rank()
        owner, expert = self._expert_place(entry)
        if self._stage_of(entry) != stage or (entry.expert is not None and owner != _ep_rank()):
            return None
        prefix = ""
        if entry.layer is not None:
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            prefix = f"decoder.layers.{entry.layer - self._config.layers_of_stage(stage, stages).start}."
        names = (prefix + name.replace("{expert}", str(expert)) for name in entry.names)
        return next((name for name in names if name in present), None)

    def _tied_copy(self, model: MegatronModel, entry: Entry) -> str | None:
        """The last stage's own copy of a tied embedding, when it is not the first stage too."""
        tied = model.share_embeddings_and_output_weights and entry.hf == (_EMBEDDING,)
        return _MCORE_HEAD if tied and model.post_process and not model.pre_process else None

    def _harmless(self, key: str) -> bool:
        return key.endswith("rotary_emb.inv_freq") or (self._config.tie_embeddings and key == HEAD)


def _names_of(model: MegatronModel) -> Set[str]:
    return {name for name, _ in model.named_parameters()}


class _Gather:
    """Brings one tensor at a time to global rank 0, from the first ranks that hold it."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        first = next(iter(source.values()))  # one only: a mapping may gather each tensor when it is read
        self._dtype, self._device = first.dtype, first.device
        self._rank = dist.get_rank()

    def to_rank_zero(self, entry: Entry, leader: int, local: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """The whole tensor on global rank 0, None elsewhere. `leader`: first of the global ranks that hold it."""
        full: Tensor | None = None
        group = _group_of(entry)
        if dist.get_process_group_ranks(group)[0] == leader:
            if local is None:
                raise ValueError(f"rank {self._rank} has no Megatron parameter for {entry.hf}")
            if local.dtype is not self._dtype:
                raise ValueError(f"{entry.hf}: tensors must share one dtype, got {local.dtype} beside {self._dtype}")
            full = _gathered(entry, local.detach(), group, 0)
        if leader == 0:
            return full
        if full is not None:
            dist.send(full.contiguous(), dst=0)
        if self._rank != 0:
            return None
        received = torch.empty(shape, dtype=self._dtype, device=self._device)
        dist.recv(received, src=leader)
        return received


class _Shares:
    """Deals tensors out to the ranks that hold them: each to the one with the fewest bytes so far, of experts and others apart.

    All ranks that hold a tensor must ask in the same order.
    """

    def __init__(self) -> None:
        dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True) * _tp_size()
        experts = parallel_state.get_expert_data_parallel_world_size() * _etp_size()
        self._sizes = {False: [0] * dense, True: [0] * experts}

    def place_of(self, entry: Entry) -> int | None:
        """Rank, within the group over which this rank's copy of the tensor is cut, that gets the tensor whole; None: another copy's."""
        apart = entry.expert is not None
        sizes = self._sizes[apart]
        chosen = sizes.index(min(sizes))
        sizes[chosen] += sum(math.prod(shape) for shape in entry.shapes)
        copy, place = divmod(chosen, _etp_size() if apart else _tp_size())
        if apart:
            mine = parallel_state.get_expert_data_parallel_rank()
        else:
            mine = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return place if copy == mine else None


def _gathered(entry: Entry, local: Tensor, group: dist.ProcessGroup, place: int) -> Tensor | None:
    """The whole tensor on the group's rank `place`, None on its others."""
    here = group.rank() == place
    if group.size() == 1 or entry.packing == "whole":
        return local if here else None
    shards = [torch.empty_like(local) for _ in range(group.size())] if here else None
    dist.gather(local.contiguous(), shards, dst=dist.get_global_rank(group, place), group=group)
    return None if shards is None else _unshard(entry, shards)


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, kv_heads: int) -> Tensor:
    """[heads * d, ...] and twice [kv_heads * d, ...] -> [(heads + 2 kv_heads) * d, ...], per key/value head q.., k, v."""
    parts = [x.unflatten(0, (kv_heads, -1)) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def unpack_qkv(packed: Tensor, kv_heads: int, queries_per_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_qkv`."""
    heads = packed.unflatten(0, (kv_heads, queries_per_kv + 2, -1))
    query, key, value = heads.split([queries_per_kv, 1, 1], dim=1)
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)


def _shard(entry: Entry, full: Tensor, group: dist.ProcessGroup) -> Tensor:
    size, rank = group.size(), group.rank()
    if size == 1 or entry.packing == "whole":
        return full
    if entry.packing == "gate_up":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim=1 if entry.packing == "columns" else 0)[rank]


def _unshard(entry: Entry, shards: Sequence[Tensor]) -> Tensor:
    if entry.packing == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    return torch.cat(list(shards), dim=1 if entry.packing == "columns" else 0)


def _named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"`tensors` lacks the parameter {name!r}")
    return tensors[name]


def _group_of(entry: Entry) -> dist.ProcessGroup:
    """The ranks over which the tensor is cut."""
    if entry.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _tp_size() -> int:
    size: int = parallel_state.get_tensor_model_parallel_world_size()
    return size


def _etp_size() -> int:
    size: int = parallel_state.get_expert_tensor_parallel_world_size()
    return size


def _ep_size() -> int:
    size: int = parallel_state.get_expert_model_parallel_world_size()
    return size


def _ep_rank() -> int:
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return rank


def _experts_apart() -> bool:
    """Whether other ranks hold the same experts than hold the same dense weights."""
    return _ep_size() > 1 or _etp_size() != _tp_size()


def _entries(config: ModelConfig) -> Iterator[Entry]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield Entry("vocab", (_EMBEDDING,), ((vocab, hidden),), (_MCORE_EMBEDDING,))
    for layer in range(config.layers):
        yield from _layer_entries(config, layer)
    yield from _norm_entries(config, "model.norm", ("decoder.final_layernorm.",), hidden)
    if config.score_head:
        yield Entry("whole", (SCORE,), ((1, hidden),), (SCORE,))
    elif not config.tie_embeddings:
        yield Entry("vocab", (HEAD,), ((vocab, hidden),), (_MCORE_HEAD,))


def _layer_entries(config: ModelConfig, layer: int) -> Iterator[Entry]:
    hidden, matrices = config.hidden_size, config.projections

    def hf(*names: str) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}.{name}" for name in names)

    entry, norm = partial(Entry, layer=layer), partial(_norm_entries, config, layer=layer)
    before_mlp = hf("pre_feedforward_layernorm" if config.traits.post_norms else "post_attention_layernorm")[0]
    yield from norm(hf("input_layernorm")[0], ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"), hidden)
    qkv = {f"self_attn.{p}": matrices[p] for p in QKV_PROJECTIONS}
    if config.traits.packed:
        qkv = _one_below_the_other("self_attn.qkv_proj", qkv)
    weights = hf(*(f"{p}.weight" for p in qkv))
    yield entry("qkv", weights, tuple(qkv.values()), ("self_attention.linear_qkv.weight",))
    if config.traits.qkv_bias:
        shapes = tuple(shape[:1] for shape in qkv.values())
        yield entry("qkv", hf(*(f"{p}.bias" for p in qkv)), shapes, ("self_attention.linear_qkv.bias",))
    if config.traits.qk_norm:
        for x in "qk":
            yield from norm(hf(f"self_attn.{x}_norm")[0], (f"self_attention.{x}_layernorm.",), config.head_dim)
    out = hf("self_attn.o_proj.weight")
    yield entry("columns", out, (matrices["o_proj"],), ("self_attention.linear_proj.weight",))
    if config.traits.post_norms:
        yield from norm(hf("post_attention_layernorm")[0], ("post_attention_layernorm.",), hidden)
        yield from norm(hf("post_feedforward_layernorm")[0], ("post_mlp_layernorm.",), hidden)
    yield from norm(before_mlp, ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"), hidden)
    if config.experts is not None:
        yield from _expert_entries(config, layer)
        return
    gate_up = {f"mlp.{p}": matrices[p] for p in config.traits.projections}
    if config.traits.packed:
        gate_up = _one_below_the_other("mlp.gate_up_proj", gate_up)
    weights = hf(*(f"{p}.weight" for p in gate_up))
    packing: Packing = "gate_up" if config.traits.gated else "rows"
    yield entry(packing, weights, tuple(gate_up.values()), ("mlp.linear_fc1.weight",))
    yield entry("columns", hf("mlp.down_proj.weight"), (matrices["down_proj"],), ("mlp.linear_fc2.weight",))


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
    yield Entry("whole", (f"{block}.gate.weight",), router, ("mlp.router.weight",), layer)
    for i in range(experts.count):
        hf = tuple(f"{block}.experts.{i}.{x}.weight" for x in (gate, up))
        yield Entry("gate_up", hf, (shapes[0], shapes[1]), _expert_names("linear_fc1"), layer, i)
        yield Entry(
            "columns", (f"{block}.experts.{i}.{down}.weight",), (shapes[2],), _expert_names("linear_fc2"), layer, i
        )


def _expert_names(part: str) -> tuple[str, str]:
    """One expert by itself, and as Transformer Engine's product over all of a rank's experts holds it."""
    return f"mlp.experts.local_experts.{{expert}}.{part}.weight", f"mlp.experts.{part}.weight{{expert}}"
