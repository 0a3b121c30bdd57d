"""Hugging Face names and shapes <-> this rank's Megatron parameters, both ways, at any tensor-, expert- and pipeline-parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.fp8_weights import fill, plain
from nemo_rl_like.model.hf_config import QKV_PROJECTIONS, ModelConfig
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.nf4 import Nf4Weight
from nemo_rl_like.model.weight_entries import EMBEDDING, HEAD, MCORE_HEAD, Entry, beside, entries_of
from nemo_rl_like.model.weight_shards import (
    Gather,
    Shares,
    ep_rank,
    ep_size,
    etp_size,
    experts_apart,
    gathered,
    group_of,
    pack_qkv,
    pp_size,
    shard,
    stage_count,
    tp_size,
    unpack_qkv,
    unshard,
)
from nemo_rl_like.tensors.packed import Packed

_SHARD_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")
"""Attributes that Megatron reads: whether a parameter is a piece, along which dimension, in how many strides."""
_SUMMED = "allreduce"
"""Another: whether the gradient is summed over all data-parallel ranks, not those of experts."""


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
        self.entries = tuple(entries_of(config)) if entries is None else entries
        self._whole = True

    def only(self, keep: Callable[[Entry], bool]) -> WeightMap:
        """The same map of the entries that `keep` says yes to, which leaves all other parameters alone."""
        part = copy(self)
        part.entries, part._whole = tuple(filter(keep, self.entries)), False
        return part

    @property
    def trained(self) -> WeightMap:
        """The map of what an optimizer trains."""
        return self.only(lambda entry: not entry.fixed)

    def owns(self, name: str) -> bool:
        """Whether a Megatron parameter belongs to this map."""
        return not beside(name)

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
        if self._config.tie_embeddings and HEAD in keys and not torch.equal(reader.get(HEAD), reader.get(EMBEDDING)):
            raise InputError(
                f"{reader.source(HEAD)}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; "
                "set tie_word_embeddings to false to keep both"
            )

    def load_hf(self, model: MegatronModel, reader: TensorReader) -> None:
        """Copy this rank's parameters out of `reader`.

        Raises InputError listing the keys that are missing or have no place, or naming a tensor of the wrong shape.
        """
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, entry, wholes in self._local_wholes(model, reader):
                parameter = parameters[name]
                if isinstance(parameter, Nf4Weight):
                    parameter.quantize(wholes, partial(self.local_part, entry))
                else:
                    fill(parameter, self.local_part(entry, wholes))

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
            if entry.of_experts:
                setattr(parameters[name], _SUMMED, not experts_apart())

    def local_entries(self, model: MegatronModel) -> Iterator[tuple[str, Entry]]:
        """This rank's parameters by name, with what each is made of; a tied embedding's copy on the last stage is one too."""
        present = _names_of(model)
        for entry in self.entries:
            for name in (self._local_name(present, entry), self._tied_copy(model, entry)):
                if name is not None:
                    yield name, entry

    def wholes(self, entry: Entry, local: Tensor) -> list[Tensor]:
        """The whole Hugging Face tensors of which `local` is this rank's part. Collective over the ranks among which they are cut."""
        group = group_of(entry)
        if group.size() == 1 or entry.packing == "whole":
            return self._split(entry, local)
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local.contiguous(), group=group)
        return self._split(entry, unshard(entry, shards))

    def local_part(self, entry: Entry, wholes: Sequence[Tensor]) -> Tensor:
        """This rank's part of the parameter that is made of these whole Hugging Face tensors."""
        return shard(entry, self._merge(entry, wholes), group_of(entry))

    def scatter_hf(self, model: MegatronModel, reader: TensorReader) -> dict[str, Tensor]:
        """This rank's part of each of `reader`'s tensors (for example Adam moments), by parameter name; new tensors."""
        found = self._local_wholes(model, reader)
        return {name: self.local_part(entry, wholes).clone() for name, entry, wholes in found}

    def iter_hf(
        self, model: MegatronModel, tensors: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Collective: yields (Hugging Face name, whole tensor on global rank 0, None on the others), one tensor at a time.

        `tensors` replaces the parameters by tensors of the same names and shapes, all of one dtype. Every rank must run the
        iterator to its end.
        """
        source = dict(model.named_parameters()) if tensors is None else tensors
        gather, present = Gather(source), _names_of(model)
        for entry in self.entries:
            name = self._local_name(present, entry)
            local = None if name is None else plain(_named(source, name))
            full = gather.to_rank_zero(entry, self._leader(entry), local, self._padded_shape(entry))
            parts = [None] * len(entry.hf) if full is None else self._split(entry, full)
            yield from zip(entry.hf, parts, strict=True)

    def iter_shares(self, model: MegatronModel, tensors: Mapping[str, Tensor] | None = None) -> Iterator[Packed]:
        """Collective: yields the tensors of this rank's share of the model.

        Every tensor is in the share of one of the ranks that hold it; shares are of about the same size. `tensors` as in `iter_hf`.
        """
        source = dict(model.named_parameters()) if tensors is None else tensors
        present, shares = _names_of(model), Shares()
        for entry in self.entries:
            name = self._local_name(present, entry)
            if name is None:
                continue
            local, place = _named(source, name), shares.place_of(entry)
            if place is not None:
                full = gathered(entry, plain(local).detach(), group_of(entry), place)
                if full is not None:
                    yield Packed(entry.hf, full, partial(self._split, entry))

    def _local_wholes(
        self, model: MegatronModel, reader: TensorReader
    ) -> Iterator[tuple[str, Entry, Sequence[Tensor]]]:
        """This rank's parameters by name, with what each is made of and those tensors."""
        self.check(reader)
        filled = set()
        for name, entry in self.local_entries(model):
            filled.add(name)
            yield name, entry, [reader.get(source) for source in entry.hf]
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
            extra = self._config.padded_vocab(tp_size()) - self._config.vocab_size
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
        rows = self._config.padded_vocab(tp_size()) if entry.packing == "vocab" else sum(s[0] for s in entry.shapes)
        return (rows, *entry.shapes[0][1:])

    def _stage_of(self, entry: Entry) -> int:
        """Pipeline stage that holds the tensor (the first one for a tied embedding)."""
        stages = stage_count()
        if entry.layer is not None:
            return entry.layer // len(self._config.layers_of_stage(0, stages))
        return 0 if entry.hf == (EMBEDDING,) else stages - 1

    def _expert_place(self, entry: Entry) -> tuple[int, int]:
        """Expert-parallel rank that holds the tensor, and the expert's number there; both 0 outside the experts."""
        return divmod(entry.expert or 0, self._experts // ep_size())

    def _leader(self, entry: Entry) -> int:
        """First of the global ranks that hold the tensor."""
        pp = pp_size()
        first = self._stage_of(entry) % pp * (dist.get_world_size() // pp)
        return first + self._expert_place(entry)[0] * etp_size()

    def _local_name(self, present: Set[str], entry: Entry) -> str | None:
        """Which of the `present` parameters of this rank's model it is; None where another stage or expert-parallel rank holds it."""
        stage = self._stage_of(entry)
        owner, expert = self._expert_place(entry)
        elsewhere = stage % pp_size() != parallel_state.get_pipeline_model_parallel_rank()
        if elsewhere or (entry.expert is not None and owner != ep_rank()):
            return None
        prefix = f"pipeline.{stage // pp_size()}."
        if entry.layer is not None:
            prefix += f"decoder.layers.{entry.layer - self._config.layers_of_stage(stage, stage_count()).start}."
        names = (prefix + name.replace("{expert}", str(expert)) for name in entry.names)
        return next((name for name in names if name in present), None)

    def _tied_copy(self, model: MegatronModel, entry: Entry) -> str | None:
        """The last stage's own copy of a tied embedding, when it is not the first stage too."""
        last = model.last
        tied = last.share_embeddings_and_output_weights and entry.hf == (EMBEDDING,)
        return (
            f"pipeline.{len(model.stages) - 1}.{MCORE_HEAD}"
            if tied and last.post_process and not last.pre_process
            else None
        )

    def _harmless(self, key: str) -> bool:
        if self._config.traits.further_layers and key.startswith("model.layers."):
            index = key.split(".")[2]
            return index.isdecimal() and int(index) >= self._config.layers
        return key.endswith("rotary_emb.inv_freq") or (self._config.tie_embeddings and key == HEAD)


def _names_of(model: MegatronModel) -> Set[str]:
    return {name for name, _ in model.named_parameters()}


def _named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"`tensors` lacks the parameter {name!r}")
    return tensors[name]
