"""Pieces of a tensor on the ranks that hold it: cut, put together, and brought to one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.model.fp8_weights import plain
from nemo_rl_like.model.mcore import parallel_state
from nemo_rl_like.model.weight_entries import Entry


class Gather:
    """Brings one tensor at a time to global rank 0, from the first ranks that hold it."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        first = plain(next(iter(source.values())))  # one only: a mapping may gather each tensor when it is read
        self._dtype, self._device = first.dtype, first.device
        self._rank = dist.get_rank()

    def to_rank_zero(self, entry: Entry, leader: int, local: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """The whole tensor on global rank 0, None elsewhere. `leader`: first of the global ranks that hold it."""
        full: Tensor | None = None
        dtype = torch.float32 if entry.fixed else self._dtype
        group = group_of(entry)
        if dist.get_process_group_ranks(group)[0] == leader:
            if local is None:
                raise ValueError(f"rank {self._rank} has no Megatron parameter for {entry.hf}")
            if local.dtype is not dtype:
                raise ValueError(f"{entry.hf}: tensors must share one dtype, got {local.dtype} beside {dtype}")
            full = gathered(entry, local.detach(), group, 0)
        if leader == 0:
            return full
        if full is not None:
            dist.send(full.contiguous(), dst=0)
        if self._rank != 0:
            return None
        received = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(received, src=leader)
        return received


class Shares:
    """Deals tensors out to the ranks that hold them: each to the one with the fewest bytes so far, of experts and others apart.

    All ranks that hold a tensor must ask in the same order.
    """

    def __init__(self) -> None:
        dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True) * tp_size()
        copies = parallel_state.get_expert_data_parallel_world_size()
        self._dense = [0] * dense
        self._experts, self._stacked = [0] * (copies * etp_size()), [0] * (copies * ep_size())

    def place_of(self, entry: Entry) -> int | None:
        """Rank, within the group over which this rank's copy of the tensor is cut, that gets the tensor whole; None: another copy's."""
        stacked = entry.packing == "experts"
        sizes = self._stacked if stacked else self._experts if entry.of_experts else self._dense
        chosen = sizes.index(min(sizes))
        sizes[chosen] += sum(math.prod(shape) for shape in entry.shapes)
        copy, place = divmod(chosen, group_of(entry).size())
        if entry.of_experts:
            mine = parallel_state.get_expert_data_parallel_rank()
        else:
            mine = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return place if copy == mine else None


def gathered(entry: Entry, local: Tensor, group: dist.ProcessGroup, place: int) -> Tensor | None:
    """The whole tensor on the group's rank `place`, None on its others."""
    here = group.rank() == place
    if group.size() == 1 or entry.packing == "whole":
        return local if here else None
    shards = [torch.empty_like(local) for _ in range(group.size())] if here else None
    dist.gather(local.contiguous(), shards, dst=dist.get_global_rank(group, place), group=group)
    return None if shards is None else unshard(entry, shards)


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, kv_heads: int) -> Tensor:
    """[heads * d, ...] and twice [kv_heads * d, ...] -> [(heads + 2 kv_heads) * d, ...], per key/value head q.., k, v."""
    parts = [x.unflatten(0, (kv_heads, -1)) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def unpack_qkv(packed: Tensor, kv_heads: int, queries_per_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_qkv`."""
    heads = packed.unflatten(0, (kv_heads, queries_per_kv + 2, -1))
    query, key, value = heads.split([queries_per_kv, 1, 1], dim=1)
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)


def shard(entry: Entry, full: Tensor, group: dist.ProcessGroup) -> Tensor:
    size, rank = group.size(), group.rank()
    if size == 1 or entry.packing == "whole":
        return full
    if entry.packing == "gate_up":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim=1 if entry.packing == "columns" else 0)[rank]


def unshard(entry: Entry, shards: Sequence[Tensor]) -> Tensor:
    if entry.packing == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    return torch.cat(list(shards), dim=1 if entry.packing == "columns" else 0)


def group_of(entry: Entry) -> dist.ProcessGroup:
    """The ranks over which the tensor is cut."""
    if entry.packing == "experts":
        return parallel_state.get_expert_model_parallel_group()
    if entry.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def pp_size() -> int:
    """Pipeline-parallel ranks."""
    size: int = parallel_state.get_pipeline_model_parallel_world_size()
    return size


def stage_count() -> int:
    """Pipeline stages over all ranks."""
    return pp_size() * (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1)


def tp_size() -> int:
    size: int = parallel_state.get_tensor_model_parallel_world_size()
    return size


def etp_size() -> int:
    size: int = parallel_state.get_expert_tensor_parallel_world_size()
    return size


def ep_size() -> int:
    size: int = parallel_state.get_expert_model_parallel_world_size()
    return size


def ep_rank() -> int:
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return rank


def experts_apart() -> bool:
    """Whether other ranks hold the same experts than hold the same dense weights."""
    return ep_size() > 1 or etp_size() != tp_size()
