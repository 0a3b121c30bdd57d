"""`TransformersModel`: a causal language model of transformers that takes a `MicroBatch` and ends in hidden states of the scored tokens.

It is made without weights: parameters without memory, buffers as the model computes them. Whoever shards it gives them memory and values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.attention_layouts import CausalLayout, SharedPrefixLayout
from nemo_rl_like.model.dense_mask import shared_prefix_mask
from nemo_rl_like.model.heads import OutputHead
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.layouts import MicroBatch
from nemo_rl_like.spec.policy import RecomputeSpec

Settings = Mapping[str, Any]
"""A config.json's keys."""


class TransformersModel(torch.nn.Module):
    """The model as this package calls it. Run everything that reads its parameters inside a call: `model(work)`."""

    def __init__(self, hf: Any, settings: Settings) -> None:
        super().__init__()
        self.hf = hf
        self.windowed = is_windowed(settings)
        self.logit_scale = _logit_scale(settings)
        self.logit_cap: float | None = settings.get("final_logit_softcapping") or None
        self._file_names = _file_names(hf)
        self._eager = hf.config._attn_implementation == "eager"

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        """`work()`; what shards the model gathers the parameters outside its layers before it and keeps their gradients after it."""
        return work()

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The decoder's layers: what is gathered and recomputed as one."""
        names = set(self.hf._no_split_modules or ())
        return [module for module in self.hf.modules() if type(module).__name__ in names]

    def hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states [M, H] that predict the micro-batch's targets."""
        rows = _rows_of(micro_batch, self._eager, self.dtype)
        states: Tensor = self.hf.base_model(input_ids=micro_batch.input_ids, use_cache=False, **rows).last_hidden_state
        return states.flatten(0, 1).index_select(0, micro_batch.predict_index)

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        dtype: torch.dtype = self.hf.get_input_embeddings().weight.dtype
        return dtype

    def head(self) -> OutputHead:
        """The output head; its logits are to be multiplied by `logit_scale`."""
        weight = self.hf.get_output_embeddings().weight
        return OutputHead(weight, weight.shape[0], cap=self.logit_cap)

    def logits(self, input_ids: Tensor) -> Tensor:
        """float32 [b, s, V] as the model itself computes them."""
        logits: Tensor = self.hf(input_ids=input_ids, use_cache=False).logits
        return logits.float()

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by the name that a file has for them, a tied one once."""
        return {self._file_names[name]: parameter for name, parameter in self.hf.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        """Those and the buffers that files hold."""
        stored = {
            self._file_names[name]: value for name, value in self.hf.state_dict().items() if name not in self._shared
        }
        return {**stored, **self.trained()}

    @property
    def _shared(self) -> set[str]:
        """Further names of tied parameters."""
        once = {name for name, _ in self.hf.named_parameters()}
        return {name for name, _ in self.hf.named_parameters(remove_duplicate=False)} - once

    def check(self, reader: TensorReader) -> None:
        """Raise InputError unless `reader` has every tensor in its shape, and nothing else but copies of tied ones."""
        needed, given = self.tensors(), set(reader.keys())
        tied = {self._file_names[name] for name in self._shared}
        ignored = [re.compile(p) for p in (r"rotary_emb\.inv_freq$", *self.hf._keys_to_ignore_on_load_unexpected)]
        missing = sorted(needed.keys() - given)
        extra = sorted(k for k in given - needed.keys() - tied if not any(p.search(k) for p in ignored))
        where = reader.source(next(iter(given))) if given else "the weights"
        if missing or extra:
            raise InputError(
                f"{where}: `policy.backend: fsdp` needs every tensor of {type(self.hf).__name__} under the name that transformers saves it by, and the file has others; "
                f"missing: {missing[:5]}; without a place: {extra[:5]}. Save the model with transformers' save_pretrained; models with experts, "
                "which transformers joins in memory, need `policy.backend: megatron`"
            )
        for name, tensor in needed.items():
            if reader.shape(name) != tuple(tensor.shape):
                raise InputError(
                    f"{reader.source(name)}: tensor {name} has shape {list(reader.shape(name))}, but config.json asks for {list(tensor.shape)}"
                )


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    """The model of a Hugging Face folder with parameters of `dtype` that have no memory yet. It computes without dropout.

    Raises InputError for what transformers cannot read, and for a model whose output head is more than a product.
    """
    try:
        settings = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise InputError(f"{folder}: transformers cannot read its config.json: {error}") from error
    raw = settings.to_dict()
    _refuse(raw, folder)
    attention = "eager" if raw.get("attn_logit_softcapping") else None  # only the plain path caps attention's logits
    more = {} if attention is None else {"attn_implementation": attention}
    with no_init_weights(), _parameters_without_memory():
        try:
            hf = AutoModelForCausalLM.from_config(settings, dtype=dtype, **more, trust_remote_code=False)
        except ValueError as error:
            raise InputError(
                f"{folder}: transformers has no causal language model of this config.json: {error}"
            ) from error
    hf.tie_weights()
    if hf.get_output_embeddings() is None or hf.get_output_embeddings().bias is not None:
        raise InputError(
            f"{folder}: {type(hf).__name__} has no output head that is one matrix without a bias; such models are not supported"
        )
    return TransformersModel(hf.eval(), raw)


def is_windowed(settings: Settings) -> bool:
    """Whether some layer attends to less than all that stands before a token."""
    kinds = set(settings.get("layer_types") or ())
    return bool(kinds - {"full_attention"} or settings.get("sliding_window") or settings.get("attention_chunk_size"))


def recompute_blocks(model: TransformersModel, recompute: RecomputeSpec | None) -> None:
    """Keep only the inputs of the layers for the backward pass, of the first `recompute.layers` or all."""
    if recompute is None:
        return
    for block in model.blocks[: recompute.layers]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def give_memory(model: TransformersModel, device: torch.device) -> None:
    """Give every parameter memory on `device`, with any values; tied ones stay one."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = torch.nn.Parameter(torch.empty_like(parameter, device=device))
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _rows_of(micro_batch: MicroBatch, eager: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """How the rows of a pass reach transformers: by positions that start anew in each, or for shared prompts by a mask."""
    if isinstance(micro_batch.attention, CausalLayout):
        return {}
    rows = {"position_ids": micro_batch.position_ids}
    if isinstance(micro_batch.attention, SharedPrefixLayout):
        ids = micro_batch.input_ids
        mask = shared_prefix_mask(micro_batch.attention, ids.shape[1], ids.device)[None, None]
        if eager:
            mask = torch.zeros(mask.shape, dtype=dtype, device=ids.device).masked_fill_(~mask, torch.finfo(dtype).min)
        rows["attention_mask"] = mask
    return rows


def _file_names(hf: Any) -> dict[str, str]:
    """The name that files have for each of the model's tensors: transformers renames some where it loads and saves."""
    renamings: list[Any] = [
        transform.reverse_transform()
        for transform in reversed(get_model_conversion_mapping(hf, add_legacy=False))
        if isinstance(transform, WeightRenaming) and not isinstance(transform, PrefixChange)
    ]
    return {name: rename_source_key(name, renamings, [], reverse=True)[0] for name in hf.state_dict()}


def _logit_scale(settings: Settings) -> float:
    """What the model's own head multiplies its logits by: `logit_scale` (Cohere), or 1 / `logits_scaling` (Granite)."""
    scale = settings.get("logit_scale")
    divisor = settings.get("logits_scaling")
    return float(1.0 if scale is None else scale) / float(1.0 if divisor is None else divisor)


def _refuse(settings: Settings, folder: Path) -> None:
    """Raise InputError for what is known to be computed otherwise here."""
    if settings.get("final_logit_softcapping") and _logit_scale(settings) != 1:
        raise InputError(
            f"{folder}/config.json: final_logit_softcapping and a scale of logits are both set, and which comes first depends on the model; "
            "`policy.backend: fsdp` knows neither order"
        )
    if settings.get("quantization_config"):
        raise InputError(f"{folder}/config.json: quantization_config is set; load unquantised weights")


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Inside the block parameters go to the meta device as they are registered; buffers keep their values."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
