"""The sharded model's weights and optimizer state on disk: the same files as Megatron's, so that a checkpoint of one loads in the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from nemo_rl_like.model.hf_io import SafetensorsReader, TensorReader
from nemo_rl_like.model.transformers_model import TransformersModel
from nemo_rl_like.policy.fsdp_optimizer import ShardedOptimizer
from nemo_rl_like.policy.optimizer import MASTER
from nemo_rl_like.policy.store import PrefixedReader, copy_side_files, require_kind, write_kind
from nemo_rl_like.tensors.packed import Packed


class ShardedStore:
    """Reads and writes one rank's shards; every method is collective, and every rank writes its share. One whole tensor exists at a time."""

    def __init__(self, model: TransformersModel, dtype: torch.dtype, source: Path) -> None:
        """`dtype`: of weights that leave; `source`: the Hugging Face folder whose configuration and tokenizer files checkpoints carry."""
        self._model = model
        self._dtype = dtype
        self._source = source

    @torch.no_grad()
    def fill(self, reader: TensorReader) -> None:
        """Take this rank's shards from whole tensors. Raises InputError unless the reader has every tensor in its shape."""
        self._model.check(reader)
        for name, tensor in self._model.tensors().items():
            tensor.copy_(_shard_of(reader.get(name), tensor))

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """See `Backend`."""
        for name, tensor in self._model.tensors().items():
            whole = _whole(tensor)
            yield name, whole.to(self._dtype) if whole is not None and whole.is_floating_point() else whole

    def sections(self, optimizer: ShardedOptimizer | None, prefix: str) -> Iterator[tuple[str, Iterator[Packed]]]:
        """See `PolicyStore.sections`."""
        yield (
            f"{prefix}weights",
            self._shares((name, tensor, self._dtype) for name, tensor in self._model.tensors().items()),
        )
        if optimizer is not None:
            yield f"{prefix}optimizer", self._shares(self._states(optimizer))

    def write_beside(self, folder: Path, optimizer: ShardedOptimizer | None, prefix: str) -> None:
        """See `PolicyStore.write_beside`."""
        if dist.get_rank() != 0:
            return
        copy_side_files(self._source, folder / f"{prefix}weights")
        if optimizer is not None:
            write_kind(folder / f"{prefix}optimizer", optimizer.kind)

    def _states(self, optimizer: ShardedOptimizer) -> Iterator[tuple[str, Tensor, torch.dtype]]:
        for kind in optimizer.kinds:
            for name, state in optimizer.state(kind):
                yield f"{kind}/{name}", state, torch.float32
        if self._dtype is not torch.float32:
            for name, parameter in optimizer.parameters.items():
                yield f"{MASTER}/{name}", parameter.detach(), torch.float32

    def _shares(self, tensors: Iterable[tuple[str, Tensor, torch.dtype]]) -> Iterator[Packed]:
        """Those of the whole tensors, in the type given if they are numbers with a point, that this rank writes: each goes to the rank with the
        fewest bytes so far. Collective.
        """
        sizes = [0] * dist.get_world_size()
        for name, tensor, dtype in tensors:
            owner = sizes.index(min(sizes))
            sizes[owner] += tensor.numel()
            whole = _gathered(tensor)
            if owner == dist.get_rank():
                yield Packed((name,), whole.to(dtype) if whole.is_floating_point() else whole, lambda packed: [packed])

    @torch.no_grad()
    def load_optimizer(self, folder: Path, optimizer: ShardedOptimizer, updates: int) -> None:
        """Take this rank's optimizer state, as it was after `updates` optimizer steps. Raises InputError for another kind of optimizer."""
        require_kind(folder, optimizer.kind)
        with SafetensorsReader(folder) as reader:
            states = {
                kind: {
                    name: _shard_of(PrefixedReader(reader, kind).get(name), parameter)
                    for name, parameter in optimizer.parameters.items()
                }
                for kind in optimizer.kinds
            }
            if self._dtype is not torch.float32:
                masters = PrefixedReader(reader, MASTER)
                for name, parameter in optimizer.parameters.items():
                    parameter.copy_(_shard_of(masters.get(name), parameter))
        optimizer.restore(states, updates)


def _shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, sharded, placed and typed as `like` is; no rank talks."""
    if not isinstance(like, DTensor):
        return whole.to(like.dtype)
    return distribute_tensor(whole.to(like.dtype), like.device_mesh, like.placements, src_data_rank=None)


def _whole(tensor: Tensor) -> Tensor | None:
    """The whole tensor on rank 0, None elsewhere; collective."""
    whole = _gathered(tensor)
    return whole if dist.get_rank() == 0 else None


def _gathered(tensor: Tensor) -> Tensor:
    """The whole tensor; collective."""
    whole: Tensor = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor
    return whole
