"""A policy's weights and optimizer state on disk, in Hugging Face names and shapes, so that they load at any layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.checkpoint.layout import ADAPTER
from nemo_rl_like.checkpoint.shards import section_writer
from nemo_rl_like.model.bottleneck import BottleneckMap
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader, TensorReader
from nemo_rl_like.model.lora import MergedWeights
from nemo_rl_like.model.lora_map import AdapterMap, hf_projection, in_experts, is_stacked
from nemo_rl_like.model.lora_stacked import STACKED
from nemo_rl_like.model.merged_reader import merged_of
from nemo_rl_like.model.prefix import PrefixMap
from nemo_rl_like.model.virtual_tokens import PromptMap
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.policy.fp8_state import load_scaling, scaling_shares, write_scaling
from nemo_rl_like.policy.moments import GatheredState, put_state
from nemo_rl_like.policy.optimizer import PolicyOptimizer
from nemo_rl_like.spec.policy import (
    AdapterSpec,
    BottleneckSpec,
    Fp8Spec,
    LoraSpec,
    PrefixTuningSpec,
    PromptTuningSpec,
    VirtualTokensSpec,
)
from nemo_rl_like.tensors.packed import Packed
from nemo_rl_like.tensors.shards import INDEX, ShardFile

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_KIND = "adapter_kind"
"""In the description of what PEFT has not."""
BASE_ADAPTER = "base_adapter"
"""There too: adapters that were merged into the base, which no folder then holds."""
OPTIMIZER = "optimizer.json"
"""Beside the optimizer's state: its kind, as the spec names it."""


class PolicyStore:
    """Reads and writes one rank's model; every method is collective, and every rank writes its share."""

    def __init__(
        self,
        model: MegatronModel,
        config: ModelConfig,
        source: Path,
        adapter: LoraSpec | AdapterSpec | None = None,
        fp8: Fp8Spec | None = None,
    ) -> None:
        """`source`: the Hugging Face folder whose configuration and tokenizer files every checkpoint carries; `adapter`: what the model has
        beside it; `fp8`: its FP8 layers."""
        self._model = model
        self._source = source
        self._config = config
        self._map = WeightMap(config)
        self._adapter = adapter
        self._scaled = fp8 if fp8 is not None and fp8.recipe == "delayed" else None
        self.trained: WeightMap = trained_map(config, adapter)
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    def sections(self, optimizer: PolicyOptimizer | None, prefix: str = "") -> Iterator[tuple[str, Iterator[Packed]]]:
        """This rank's share of a checkpoint: tensors of `weights`, `adapter` and `optimizer`, with `prefix` before those names.

        Every rank must run each to its end, in order.
        """
        yield f"{prefix}weights", self._map.iter_shares(self._model, self._merged())
        if self._adapter is not None:
            yield f"{prefix}{ADAPTER}", self.trained.iter_shares(self._model)
        if optimizer is not None:
            scaling = () if self._scaled is None else scaling_shares(self._model)
            yield f"{prefix}optimizer", chain(self._state(optimizer), scaling)

    def write_beside(self, folder: Path, optimizer: PolicyOptimizer | None, prefix: str = "") -> None:
        """On rank 0 write what makes `weights` a whole Hugging Face folder, and what describes adapters and the optimizer."""
        if dist.get_rank() != 0:
            return
        copy_side_files(self._source, folder / f"{prefix}weights")
        if self._config.score_head:
            _say_score_head(folder / f"{prefix}weights" / "config.json", self._config)
        if self._adapter is not None:
            file = folder / f"{prefix}{ADAPTER}" / ADAPTER_CONFIG
            write_adapter_config(file, self._adapter, self._config, self._source)
        if optimizer is not None:
            write_kind(folder / f"{prefix}optimizer", optimizer.kind)
            if self._scaled is not None:
                write_scaling(folder / f"{prefix}optimizer", self._scaled, self._experts)

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every weight by Hugging Face name, adapters merged, whole on rank 0 and None elsewhere; every rank must run it to its end."""
        return self._map.iter_hf(self._model, self._merged())

    def _merged(self) -> MergedWeights | None:
        return MergedWeights(self._model) if isinstance(self._adapter, LoraSpec) else None

    def _state(self, optimizer: PolicyOptimizer) -> Iterator[Packed]:
        for kind in optimizer.kinds:
            state = GatheredState(optimizer, self._names, kind)
            for share in self._with_state(optimizer, kind).iter_shares(self._model, state):
                yield replace(share, names=tuple(f"{kind}/{name}" for name in share.names))

    def _with_state(self, optimizer: PolicyOptimizer, kind: str) -> WeightMap:
        """The map of the parameters that have this kind of state."""
        return self.trained.only(lambda entry: kind in optimizer.kinds_of(entry))

    def load_weights(self, folder: Path, prefix: str = "") -> None:
        """Take what this rank trains from a checkpoint: its weights, or its adapters beside the base, which stays."""
        held, section = (self._map, "weights") if self._adapter is None else (self.trained, ADAPTER)
        held.load_hf(self._model, SafetensorsReader(folder / f"{prefix}{section}"))

    def load_optimizer(self, folder: Path, optimizer: PolicyOptimizer, updates: int) -> None:
        """Take this rank's optimizer state from `folder`, as it was after `updates` optimizer steps.

        Raises InputError for the state of another kind of optimizer.
        """
        require_kind(folder, optimizer.kind)
        reader = SafetensorsReader(folder)
        kinds = {
            kind: self._with_state(optimizer, kind).scatter_hf(self._model, PrefixedReader(reader, kind))
            for kind in optimizer.kinds
        }
        put_state(optimizer, self._names, kinds)
        optimizer.restore(updates)
        if self._scaled is not None:
            load_scaling(self._model, folder, reader, self._scaled, self._experts)

    @property
    def _experts(self) -> int:
        """Experts of a layer that a rank holds; 0 for a dense model."""
        experts = self._config.experts
        return 0 if experts is None else experts.count // self._model.config.expert_model_parallel_size


def write_section(folder: Path, section: str, shares: Iterable[Packed]) -> tuple[ShardFile, ...]:
    """Write this rank's share of a section; returns the shards. Raises DiskFull."""
    with section_writer(folder, section, dist.get_rank()) as writer:
        for share in shares:
            for name, tensor in share.tensors():
                writer.add(name, tensor)
    return tuple(writer.files)


def write_kind(folder: Path, kind: str) -> None:
    """Say beside the optimizer's state what kind of optimizer it is of."""
    (folder / OPTIMIZER).write_text(json.dumps({"kind": kind}) + "\n", encoding="utf-8")


def require_kind(folder: Path, kind: str) -> None:
    """Raise InputError unless the folder holds the state of this optimizer; those of AdamW once said nothing."""
    file = folder / OPTIMIZER
    stored = json.loads(file.read_text(encoding="utf-8"))["kind"] if file.is_file() else "adamw"
    if stored != kind:
        raise InputError(
            f"{folder} holds the state of `optimizer.kind: {stored}`, but the spec has `optimizer.kind: {kind}`; set {stored} to go on, or "
            "start anew from the checkpoint's weights in a stage of another name"
        )


def copy_side_files(source: Path, target: Path) -> None:
    """Copy everything of a Hugging Face folder but weights: configuration, tokenizer, chat template."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith((".safetensors", INDEX, ".bin")):
            shutil.copyfile(file, target / file.name)


def trained_map(config: ModelConfig, adapter: LoraSpec | AdapterSpec | None) -> WeightMap:
    """The map of what is trained: the model, or what it has beside it."""
    if adapter is None:
        return WeightMap(config).trained
    if isinstance(adapter, LoraSpec):
        return AdapterMap(config, adapter)
    if isinstance(adapter, BottleneckSpec):
        return BottleneckMap(config, adapter)
    return PrefixMap(config, adapter) if isinstance(adapter, PrefixTuningSpec) else PromptMap(config, adapter)


def write_adapter_config(file: Path, adapter: LoraSpec | AdapterSpec, config: ModelConfig, base: Path) -> None:
    """The description of what stands beside it: PEFT's, or of bottleneck adapters, which PEFT has not, ours."""
    common: dict[str, object] = {"base_model_name_or_path": str(base)}
    merged = merged_of(base)
    if merged is not None:
        common = {"base_model_name_or_path": str(merged[0]), BASE_ADAPTER: str(merged[1])}
    if isinstance(adapter, BottleneckSpec):
        kind = _bottleneck_config(adapter, config)
    else:
        kind = _lora_config(adapter, config) if isinstance(adapter, LoraSpec) else _virtual_config(adapter, config)
        common |= {"task_type": "CAUSAL_LM", "inference_mode": True}
    file.write_text(json.dumps({**kind, **common}, indent=1) + "\n", encoding="utf-8")


def _bottleneck_config(adapter: BottleneckSpec, config: ModelConfig) -> dict[str, object]:
    return {
        ADAPTER_KIND: adapter.kind,
        "placement": adapter.placement,
        "width": adapter.width_in(config.hidden_size),
        "activation": adapter.activation,
        "scale": adapter.scale,
    }


def _lora_config(lora: LoraSpec, config: ModelConfig) -> dict[str, object]:
    """PEFT puts an expert's gate and up together in one of twice the rank and alpha, which `use_rslora` would scale by another factor: the
    factor is then said without it. Experts that lie in one tensor of each kind are parameters to it."""
    stacked = [name for name in lora.targets if is_stacked(config) and name in STACKED]
    plain = bool(in_experts(config, lora)) and not stacked
    return {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank if plain else lora.alpha,
        "use_rslora": lora.rslora and not plain,
        "use_dora": lora.dora,
        "target_modules": [hf_projection(config, name) for name in lora.targets if name not in stacked],
        **({"target_parameters": [f"mlp.experts.{name}" for name in stacked]} if stacked else {}),
        "lora_dropout": lora.dropout,
        "bias": "none",
    }


def _virtual_config(adapter: VirtualTokensSpec, config: ModelConfig) -> dict[str, object]:
    """PEFT's shape of what stands before each row: embeddings, or keys and values of each layer's key/value heads."""
    common = {
        "num_virtual_tokens": adapter.tokens,
        "num_layers": config.layers,
        "num_transformer_submodules": 1,
    }
    if isinstance(adapter, PromptTuningSpec):
        shape = {"token_dim": config.hidden_size, "num_attention_heads": config.heads}
        return {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM", **common, **shape}
    shape = {"token_dim": config.kv_heads * config.head_dim, "num_attention_heads": config.kv_heads}
    return {"peft_type": "PREFIX_TUNING", "prefix_projection": False, **common, **shape}


def kept_beside(checkpoint: Path) -> str | None:
    """What the checkpoint's model has beside its weights and no weights can hold; None: they are all of it."""
    file = checkpoint / ADAPTER / ADAPTER_CONFIG
    if not file.is_file():
        return None
    said = json.loads(file.read_text(encoding="utf-8"))
    if said.get(ADAPTER_KIND) == BottleneckSpec().kind:
        return BottleneckSpec.noun
    return None if said["peft_type"] == "LORA" else PrefixTuningSpec.noun


def _say_score_head(file: Path, config: ModelConfig) -> None:
    """Make a language model's config.json that of the same model with a score head."""
    raw = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**raw, **config.head_to_hf_dict()}, indent=1) + "\n", encoding="utf-8")


class PrefixedReader:
    """The tensors of one kind (`exp_avg/...`) under their bare names: a `TensorReader` over another."""

    def __init__(self, reader: TensorReader, kind: str) -> None:
        self._reader = reader
        self._prefix = f"{kind}/"

    def keys(self) -> Sequence[str]:
        """Names of this kind, without it."""
        return [key.removeprefix(self._prefix) for key in self._reader.keys() if key.startswith(self._prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self._reader.shape(self._prefix + name)

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        return self._reader.get(self._prefix + name)

    def source(self, name: str) -> str:
        """Where the tensor is, for messages."""
        return self._reader.source(self._prefix + name)
