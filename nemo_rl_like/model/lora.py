"""Low-rank adapters beside Megatron's linear layers: y = W x + scale B A x, with W frozen. Hu et al. 2021, arXiv 2106.09685.

DoRA (Liu et al. 2024, arXiv 2402.09353) learns the length of each row apart: y = m / |W + scale B A| (W x + scale B A x), in which the row
lengths | | are constants to the gradient.

Each projection that a Hugging Face model has by itself (`q_proj`, `gate_proj`, ..) gets an A and a B of its own, also where Megatron computes
several in one product, so that files are those of PEFT. Tensor parallelism cuts B by rows where it cuts W by rows, and A by columns where
it cuts W by columns; the other of the two is whole on every rank and gets the same gradient there. Every expert of a layer has adapters of
its own, cut over the ranks that cut the expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model import runtime
from nemo_rl_like.model.attention import AttentionCall
from nemo_rl_like.model.bottleneck import Bottleneck
from nemo_rl_like.model.dropout import SiteDropout, TokenKeys, channel_keys
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.fp8_weights import plain
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.local_stacked import StackedExperts
from nemo_rl_like.model.lora_map import (
    CUT_BY_COLUMNS,
    LOCAL_EXPERTS,
    NUMBERS,
    PROJECTIONS,
    WHOLE,
    AdapterMap,
    FreshAdapters,
    check_targets,
    in_experts,
    is_stacked,
    linears_of,
    of_experts,
)
from nemo_rl_like.model.lora_stacked import STACKED, StackedAdapter, StackedLowRank
from nemo_rl_like.model.lora_start import StartAdapters
from nemo_rl_like.model.mcore import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from nemo_rl_like.model.nf4 import shape_of, values_of
from nemo_rl_like.model.virtual_tokens import VirtualIds
from nemo_rl_like.model.weight_entries import ADAPTER
from nemo_rl_like.spec.policy import LoraSpec


class LowRank(nn.Module):
    """A and B of one projection, and with DoRA the lengths m of its rows: this rank's part."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, dtype: torch.dtype, device: torch.device, *, lengths: bool
    ) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.empty(outputs, rank, dtype=dtype, device=device))
        self.m = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if lengths else None


class Adapter(nn.Module):
    """The adapters of one linear layer.

    Args: `rows`, this rank's rows of each projection, in order; `parts`, those that have an adapter; `groups`, key/value heads that queries,
    keys and values are packed by, 0 where projections stand one behind the other; `by_columns`, whether W is cut by columns.
    """

    def __init__(
        self, rows: Mapping[str, int], parts: Mapping[str, LowRank], *, scale: float, groups: int, by_columns: bool
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.enabled = True
        self.sequence_parallel = False
        """Whether the layer's input (or, where it is cut by columns, its output) is this rank's part of the sequence."""
        self.held_lengths: Tensor | None = None
        """What `row_lengths` gives, while no weight changes."""
        self.dropout: SiteDropout | None = None
        """Of A's inputs, in training passes."""
        self._tokens: Tensor | None = None
        self._of: Mapping[str, LowRank] = dict(parts)
        self._rows, self._scale, self._groups, self._by_columns = dict(rows), scale, groups, by_columns
        self.with_lengths = any(part.m is not None for part in parts.values())
        """Whether it is DoRA's."""

    def output(self, base: Tensor, bias: Tensor | None, delta: Tensor, weight: Tensor) -> Tensor:
        """The layer's output with the adapters: `base` [..., out] is its own, `bias` in it, `delta` what `forward` gives, `weight` its W."""
        if not self.with_lengths:
            return base + delta
        lengths = self.row_lengths(values_of(weight)) if self.held_lengths is None else self.held_lengths
        factors = self._row_factors(lengths).to(base.dtype)
        bare = base if bias is None else base - bias
        return base + (factors - 1) * bare + factors * delta  # exactly `base` as long as the adapters are new

    def merged(self, weight: Tensor) -> Tensor:
        """float32: the weight that computes as the layer with its adapters does. With DoRA collective over the tensor-parallel ranks."""
        whole = weight.float() + self.weight()
        if not self.with_lengths:
            return whole
        return whole * self._row_factors(self._lengths_of(whole)).detach()[:, None]

    @torch.no_grad()
    def row_lengths(self, weight: Tensor) -> Tensor:
        """float32 [out]: length of each whole row of W + scale B A, in the order of the layer's rows on this rank."""
        return self._lengths_of(weight.float() + self.weight())

    def _lengths_of(self, whole: Tensor) -> Tensor:
        squares = whole.square().sum(1, dtype=torch.float64)  # the same however rows are cut
        if self._by_columns:
            dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        return squares.sqrt().float()

    @torch.no_grad()
    def start_lengths(self, weight: Tensor) -> None:
        """Make every m the length of its row now."""
        for name, lengths in self._unpacked(self.row_lengths(weight)).items():
            part = self._of.get(name)
            if part is not None and part.m is not None:
                part.m.copy_(lengths)

    def _row_factors(self, lengths: Tensor) -> Tensor:
        """float32 [out]: m over the row's length; 1 where there is no adapter."""
        factors = []
        for name, mine in self._unpacked(lengths).items():
            part = self._of.get(name)
            if part is None or part.m is None:
                factors.append(torch.ones_like(mine))
            else:
                factors.append(part.m.float() / mine.to(part.m.dtype).float())  # both rounded: new ones give exactly 1
        return self._packed(factors)

    def _unpacked(self, rows: Tensor) -> dict[str, Tensor]:
        """[out] by projection; undoes `_packed`."""
        if not self._groups:
            return dict(zip(self._rows, rows.split(list(self._rows.values())), strict=True))
        sizes = [count // self._groups for count in self._rows.values()]
        parts = rows.unflatten(0, (self._groups, -1)).split(sizes, dim=1)
        return {name: part.flatten() for name, part in zip(self._rows, parts, strict=True)}

    def forward(self, x: Tensor, places: torch.Size) -> Tensor:
        """[..., in] -> what is added to the layer's output [*places, out], which with sequence parallelism has other places."""
        deltas = []
        for name, rows in self._rows.items():
            part = self._of.get(name)
            if part is None:
                deltas.append(x.new_zeros(*places, rows))
                continue
            deltas.append(self._delta(name, part, x))
        return self._packed(deltas) * self._scale

    def _delta(self, name: str, part: LowRank, x: Tensor) -> Tensor:
        """B A x."""
        return self._across_ranks(self._inner(name, part.a, x)) @ part.b.t()

    def _inner(self, name: str, a: Tensor, x: Tensor) -> Tensor:
        if self.dropout is None or self._tokens is None:
            return x @ a.t()
        return self.dropout.product(name, x, a, self._tokens)

    def drop(self, share: float, layer: int) -> None:
        """Have dropout in passes that are shown by keys."""
        channels = {}
        for name, part in self._of.items():
            count = part.a.shape[1]
            first = parallel_state.get_tensor_model_parallel_rank() * count if self._by_columns else 0
            channels[name] = channel_keys(layer, NUMBERS[name], first, count, part.a.device)
        self.dropout = SiteDropout(share, channels)

    def show(self, keys: TokenKeys | None) -> None:
        """Drop inputs of these tokens from now on; None: of no pass."""
        self._tokens = None if keys is None else (keys.sequence if self._by_columns else keys.part)

    def share_sequences(self) -> None:
        """Work on parts of sequences. What is whole on every rank (A, or B behind columns) then sees a part only, and Megatron sums its gradient."""
        self.sequence_parallel = True
        for part in self._of.values():
            for whole in (part.b, part.m) if self._by_columns else (part.a,):
                if whole is not None:
                    whole.sequence_parallel = True  # type: ignore[attr-defined]

    def _across_ranks(self, inner: Tensor) -> Tensor:
        """A's output as B takes it: summed where A is cut, and with sequence parallelism gathered or cut as the layer's own output is."""
        if self._by_columns:
            inward = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        else:
            inward = (
                gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
            )
        found: Tensor = inward(inner)
        return found

    def weight(self) -> Tensor:
        """float32, of the layer's weight's shape on this rank: what merging adds to it."""
        some = next(iter(self._of.values())).a
        deltas = []
        for name, rows in self._rows.items():
            part = self._of.get(name)
            none = some.new_zeros(some.shape[1], rows, dtype=torch.float32)
            deltas.append(none if part is None else (part.b.float() @ part.a.float()).t())
        return self._packed(deltas).t() * self._scale

    def _packed(self, deltas: Sequence[Tensor]) -> Tensor:
        """Projections along the last axis, in the order of the layer's rows."""
        if not self._groups:
            return torch.cat(list(deltas), dim=-1)
        return torch.cat([delta.unflatten(-1, (self._groups, -1)) for delta in deltas], dim=-1).flatten(-2)


class WholeAdapter(Adapter):
    """The adapters of a linear layer that every tensor-parallel rank has whole, and that keeps the tokens that it is given."""

    def _across_ranks(self, inner: Tensor) -> Tensor:
        return inner

    def share_sequences(self) -> None:
        """See `Adapter`: all of it sees a part."""
        self.sequence_parallel = True
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


class ExpertAdapter(Adapter):
    """The adapters of one linear layer of an expert.

    What its ranks give, and what they say of their input's gradient, is summed outside, so each adds its part; what is whole on all of them
    (A, or B behind columns) gets a gradient of all their parts.
    """

    def _delta(self, name: str, part: LowRank, x: Tensor) -> Tensor:
        if self._by_columns:
            return _SharedProduct.apply(x @ part.a.t(), part.b)
        inner: Tensor = _SharedProduct.apply(x, part.a)
        return inner @ part.b.t()


class _SharedProduct(torch.autograd.Function):
    """x W^T with W whole on the ranks that cut an expert: its gradient is summed over them, that of x is this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        to_weight = grad.t() @ x
        group = parallel_state.get_expert_tensor_parallel_group()
        if group.size() > 1:
            dist.all_reduce(to_weight, group=group)
        return grad @ weight, to_weight


def add_adapters(model: MegatronModel, config: ModelConfig, lora: LoraSpec, seed: int) -> None:
    """Put adapters on the model and freeze all else: those of `lora.path`, or new ones, whose A is drawn from `seed`, the same at every layout, and
    whose B is zero, as in PEFT."""
    check_targets(config, lora)
    _check_device(model, config, lora)
    model.requires_grad_(False)
    for layer in model.layers:
        for path, linear in _linears(layer, config, lora):
            linear.lora = _adapter(shape_of(linear.weight)[1], path, config, lora, model.dtype)
            linear.register_forward_hook(_add_delta)
            if model.config.sequence_parallel and not isinstance(linear.lora, ExpertAdapter):
                linear.lora.share_sequences()
        if is_stacked(config):
            _adapt_stacked(layer.mlp.experts, lora)
        if lora.dropout:
            _drop_inputs(layer, lora.dropout)
    adapters = AdapterMap(config, lora)
    adapters.mark_shards(model)
    if lora.path is not None:
        adapters.load_hf(model, StartAdapters(config, lora, Path(lora.path)))
        return
    adapters.load_hf(model, FreshAdapters(adapters, seed))
    if lora.dora:
        for _, linear in _adapted(model):
            linear.lora.start_lengths(values_of(linear.weight))


def _adapt_stacked(experts: StackedExperts, lora: LoraSpec) -> None:
    """Put adapters on a layer's experts, if they are targets."""
    tensors = dict(zip(STACKED, (experts.gate_up, experts.down), strict=True))
    targets: tuple[str, ...] = lora.targets
    parts = {name: StackedLowRank(tensor, lora.rank) for name, tensor in tensors.items() if name in targets}
    if parts:
        experts.lora = StackedAdapter(parts, lora.scale)


def _check_device(model: MegatronModel, config: ModelConfig, lora: LoraSpec) -> None:
    """Raise InputError for what Transformer Engine's layers lack: each expert by itself, and word of which pass is computed again."""
    if not runtime.on_cuda():
        return
    found = in_experts(config, lora)
    if found:
        others = [name for name in config.projections if name not in found]
        raise InputError(
            f"policy.lora.targets has {', '.join(found)}, but on CUDA a rank's experts are computed in one product, which has no place for "
            f"adapters; use targets: [{', '.join(others)}]"
        )
    alone = model.config.recompute_granularity == "selective" and "mlp" in model.config.recompute_modules
    if lora.dropout and alone:
        raise InputError(
            f"policy.lora.dropout is {lora.dropout:g}, but on CUDA policy.recompute.modules cannot have mlp beside it; use kind: full, or leave "
            "one of them out"
        )


def _linears(layer: Any, config: ModelConfig, lora: LoraSpec) -> Iterator[tuple[str, Any]]:
    """The linear layers of a transformer layer that get adapters, by their path in it; those of experts, one after the other, by that of a
    dense layer's."""
    for path in linears_of(config, lora):
        if not of_experts(config, path):
            yield path, layer.get_submodule(path)
            continue
        for expert in layer.mlp.get_submodule(LOCAL_EXPERTS) if config.has_experts(layer.layer_number - 1) else ():
            yield path, expert.get_submodule(path.removeprefix("mlp."))


def _adapter(inputs: int, path: str, config: ModelConfig, lora: LoraSpec, dtype: torch.dtype) -> Adapter:
    """`inputs`: columns of the layer's weight on this rank."""
    by_columns, in_expert = path in CUT_BY_COLUMNS, of_experts(config, path)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    ranks = parallel_state.get_expert_tensor_parallel_world_size() if in_expert else tp
    cut = 1 if by_columns or path in WHOLE else ranks
    shapes = {name: config.projections[name] for name in PROJECTIONS[path] if name in config.projections}
    rows = {name: outputs // cut for name, (outputs, _) in shapes.items()}
    parts: dict[str, LowRank] = {
        name: LowRank(inputs, count, lora.rank, dtype, runtime.device(), lengths=lora.dora)
        for name, count in rows.items()
        if name in lora.targets
    }
    groups = config.kv_heads // tp if path == "self_attention.linear_qkv" else 0
    kind = ExpertAdapter if in_expert else WholeAdapter if path in WHOLE else Adapter
    return kind(rows, parts, scale=lora.scale, groups=groups, by_columns=by_columns)


def _add_delta(linear: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None] | Tensor) -> object:
    """Forward hook: Megatron's linear layers give (output, bias left to the caller), those that are whole on every rank the output alone."""
    adapter: Adapter = linear.lora
    if not adapter.enabled:
        return outputs
    if isinstance(outputs, Tensor):
        return adapter.output(outputs, None, adapter(inputs[0], outputs.shape[:-1]), linear.weight)
    out, left = outputs
    inside = linear.bias is not None and linear.bias.numel() > 0 and left is None  # Transformer Engine's may be empty
    bias = linear.bias if inside else None
    return adapter.output(out, bias, adapter(inputs[0], out.shape[:-1]), linear.weight), left


def _drop_inputs(layer: Any, share: float) -> None:
    """Give the adapters of a layer dropout in passes that bring token keys."""
    found = [module for module in layer.modules() if isinstance(module, Adapter)]
    for adapter in found:
        adapter.drop(share, layer.layer_number)

    def show(call: AttentionCall | None) -> None:
        for adapter in found:
            adapter.show(None if call is None else call.token_keys)

    def hook(layer: object, inputs: object, named: Mapping[str, Any]) -> None:
        show(named["packed_seq_params"])

    layer.show_pass = show
    layer.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def adapters_off(model: MegatronModel) -> Iterator[None]:
    """Inside the block the model computes without its adapters, virtual tokens or prefixes: it is the base that they started from."""
    found = [
        module for module in model.modules() if isinstance(module, Adapter | StackedAdapter | Bottleneck | VirtualIds)
    ]
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.enabled = True


@contextmanager
def lengths_held(model: MegatronModel) -> Iterator[None]:
    """Inside the block, in which no weight may change, DoRA's row lengths are computed once. Collective over tensor-parallel ranks."""
    found = [linear for _, linear in _adapted(model) if linear.lora.with_lengths]
    for linear in found:
        linear.lora.held_lengths = linear.lora.row_lengths(values_of(linear.weight))
    try:
        yield
    finally:
        for linear in found:
            linear.lora.held_lengths = None


def _adapted(model: MegatronModel) -> Iterator[tuple[str, Any]]:
    """The linear layers that have adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora", None), Adapter):
            yield name, module


class MergedWeights(Mapping[str, Tensor]):
    """The base's parameters by name, with the adapters' products added, each made when it is read."""

    def __init__(self, model: MegatronModel) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if ADAPTER not in name}
        self._merged: dict[str, Callable[[Tensor], Tensor]] = {
            f"{name}.weight": linear.lora.merged for name, linear in _adapted(model)
        }
        for name, module in model.named_modules():
            if isinstance(module, StackedExperts) and module.lora is not None:
                for part, tensor in zip(("gate_up", "down"), STACKED, strict=True):
                    self._merged[f"{name}.{part}"] = partial(module.lora.merged, tensor)

    def __getitem__(self, name: str) -> Tensor:
        weight = plain(self._parameters[name]).detach()
        if name not in self._merged:
            return weight
        with torch.no_grad():
            return self._merged[name](weight).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
