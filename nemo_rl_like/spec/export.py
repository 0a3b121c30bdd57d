"""The `export` stage: the final model as a Hugging Face folder, and as what Triton and NIM serve."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec, form
from nemo_rl_like.spec.stage import StageBase

ServedName = Annotated[
    str,
    form(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$", "up to 100 letters, digits, `_`, `-` and `.`, a letter or digit first"),
]
"""A name that is also a folder's: up to 100 letters, digits, `_`, `-` or `.`."""
AbsolutePath = Annotated[str, form(r"^/[^\s\"]*$", "an absolute path (it begins with `/`), without blanks or quotes")]
"""An absolute path without blanks or quotes."""
ServedDtype = Literal["auto", "bfloat16", "float16", "float32"]


class HfTarget(Spec):
    """A Hugging Face folder: config, tokenizer, safetensors shards; adapters merged."""

    kind: Literal["hf"] = "hf"
    """Target kind."""


class HfLoraTarget(Spec):
    """The adapters alone, as PEFT writes them (with `policy.lora` or `policy.adapter`)."""

    kind: Literal["hf-lora"] = "hf-lora"
    """Target kind."""


class TritonPythonTarget(Spec):
    """A Triton model repository whose `model.py` decodes on CPUs with transformers: the reference for tests and small models."""

    kind: Literal["triton-python"] = "triton-python"
    """Target kind."""
    model_name: ServedName = "model"
    """Name under which clients ask for it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    max_new_tokens: PositiveInt = 256
    """Longest answer that a request may ask for, in tokens."""
    threads: PositiveInt = 1
    """CPU threads of an instance."""


class TritonVllmTarget(Spec):
    """A Triton model repository for the vLLM backend (`config.pbtxt`, `1/model.json`), beside the Hugging Face folder that it names."""

    kind: Literal["triton-vllm"] = "triton-vllm"
    """Target kind."""
    model_name: ServedName = "model"
    """Name under which clients ask for it."""
    mounted_at: AbsolutePath = "/bundle"
    """Absolute path of the bundle where the server runs; paths in the repository start with it."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and answer together, in tokens; default: the model's context."""
    dtype: ServedDtype = "auto"
    """Type of weights and activations; `auto`: that of config.json."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share each layer."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages of layers, each on GPUs of its own."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory that vLLM takes."""
    kv_cache_gib: PositiveFloat | None = None
    """Key/value cache of each GPU, in GiB; default: what `gpu_memory_utilization` leaves."""
    max_batch: PositiveInt | None = None
    """Most requests decoded at once (vLLM's `max_num_seqs`); default: vLLM's."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    gpu_ids: tuple[NonNegativeInt, ...] = ()
    """GPUs of the instance, as many as both parallel sizes take; default: all that the server sees."""
    adapters: dict[ServedName, str] = Field(default_factory=dict)
    """PEFT folders served beside the model by name (`lora_name` in a request's sampling parameters)."""

    @model_validator(mode="after")
    def _gpus_fit(self) -> TritonVllmTarget:
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        if self.gpu_ids and (len(self.gpu_ids) != ranks or len(set(self.gpu_ids)) != ranks):
            raise ValueError(
                f"`gpu_ids` is {list(self.gpu_ids)}, and `tensor_parallel_size` x `pipeline_parallel_size` is {ranks}; name as many different "
                "GPUs, or leave it out"
            )
        return self


class TritonTrtllmTarget(Spec):
    """A Triton model repository for TensorRT-LLM's LLM API (`tensorrt_llm/1/model.yaml`), and a script that adds the vendor's `model.py`."""

    kind: Literal["triton-trtllm"] = "triton-trtllm"
    """Target kind."""
    mounted_at: AbsolutePath = "/bundle"
    """Absolute path of the bundle where the server runs."""
    max_seq_len: PositiveInt | None = None
    """Longest prompt and answer together, in tokens; default: the model's context."""
    dtype: ServedDtype = "auto"
    """Type of weights and activations; `auto`: that of config.json."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share each layer."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages of layers, each on GPUs of its own."""
    kv_cache_share: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of the free GPU memory that the key/value cache takes."""
    max_batch: PositiveInt | None = None
    """Most requests decoded at once; default: TensorRT-LLM's."""
    streaming: bool = True
    """Answers may come in parts (Triton's decoupled policy)."""


class NimTarget(Spec):
    """A Hugging Face folder in the layout of NVIDIA NIM for LLMs, and the environment that starts the container on it."""

    kind: Literal["nim"] = "nim"
    """Target kind."""
    version: Literal["1.x", "2.x"] = "2.x"
    """Version of the container: 2.x reads `NIM_MODEL_PATH`, 1.x `NIM_FT_MODEL`."""
    model_name: ServedName = "model"
    """Name under which clients ask for it."""
    mounted_at: AbsolutePath = "/bundle"
    """Absolute path of the bundle in the container."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and answer together, in tokens; default: the model's context."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share each layer."""


class NimLoraTarget(Spec):
    """A tree of adapters as `NIM_PEFT_SOURCE` reads it: one PEFT folder a name."""

    kind: Literal["nim-lora"] = "nim-lora"
    """Target kind."""
    adapter_name: ServedName = "adapter"
    """Name of the run's own adapters."""
    adapters: dict[ServedName, str] = Field(default_factory=dict)
    """Further PEFT folders of the same base model by name."""
    mounted_at: AbsolutePath = "/adapters"
    """Absolute path of the tree in the container."""

    @model_validator(mode="after")
    def _names_differ(self) -> NimLoraTarget:
        if self.adapter_name in self.adapters:
            raise ValueError(
                f"`adapters` has the name {self.adapter_name!r}, which is `adapter_name`; give one of them another"
            )
        return self


class QuantizedTarget(Spec):
    """A Hugging Face folder quantised by NVIDIA ModelOpt after training (`pip install nvidia-modelopt`)."""

    kind: Literal["hf-quantized"] = "hf-quantized"
    """Target kind."""
    format: Literal["fp8", "int4-awq"] = "fp8"
    """`fp8`: weights and activations in E4M3, one scale a matrix; `int4-awq`: weights in blocks of 128 input channels."""
    calibration: str
    """Text that scales are measured on: `.jsonl` with `text` a line, or plain text whose documents blank lines part."""
    samples: PositiveInt = 128
    """Documents to read."""
    sample_tokens: PositiveInt = 512
    """Tokens of each."""
    largest_kl: PositiveFloat = 0.1
    """Largest mean KL, in nats a token, of what was written from the unquantised model on the first eight documents."""


class GgufTarget(Spec):
    """One GGUF file for llama.cpp, of the families llama, qwen2 and qwen3."""

    kind: Literal["gguf"] = "gguf"
    """Target kind."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    """Type of the matrices; vectors are float32."""


TargetSpec = Annotated[
    HfTarget
    | HfLoraTarget
    | TritonPythonTarget
    | TritonVllmTarget
    | TritonTrtllmTarget
    | NimTarget
    | NimLoraTarget
    | QuantizedTarget
    | GgufTarget,
    Field(discriminator="kind"),
]
ADAPTER_TARGETS = (HfLoraTarget, NimLoraTarget)
"""Targets that hold adapters and no model."""


class ExportStageSpec(StageBase):
    """Write the final model as a Hugging Face folder, or as bundles to serve."""

    kind: Literal["export"] = "export"
    """Stage kind."""
    checkpoint: str | None = None
    """Stage whose final checkpoint is exported; default: the last one that makes one."""
    adapter: bool = False
    """Write the adapters alone, as PEFT does (with `policy.lora` or `policy.adapter`); default: the whole model, adapters merged."""
    targets: tuple[TargetSpec, ...] = ()
    """Bundles to write, each in `bundles/<kind>`; default: `model`, one Hugging Face folder (with `adapter`: the adapters)."""
    parity: Literal["auto", "full", "weights"] = "auto"
    """What is proved before anything gets its name: `weights`, every tensor's bytes; `full`, also logits, greedy tokens, chat template and stop
    tokens in plain transformers; `auto`: full where the host has the memory."""
    parity_timeout_s: PositiveFloat = 3600.0
    """Longest time that the full proof may take, in seconds."""
    license: str | None = None
    """Licence of the model, for its card (an SPDX name); default: the base model's, where its folder says one."""
    shard_gib: PositiveFloat = 4.0
    """Largest safetensors shard, in GiB."""

    @model_validator(mode="after")
    def _one_of_each(self) -> ExportStageSpec:
        kinds = [target.kind for target in self.targets]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(
                f"`targets` has {twice[0]} more than once; put the second into an `export` stage of its own"
            )
        if self.adapter and self.targets:
            raise ValueError("`adapter: true` is the target hf-lora alone; add `{kind: hf-lora}` to `targets` instead")
        return self

    @property
    def wanted(self) -> tuple[TargetSpec, ...]:
        """The targets, with the default for none."""
        if self.targets:
            return self.targets
        return (HfLoraTarget(),) if self.adapter else (HfTarget(),)

    @property
    def adapters_wanted(self) -> bool:
        """Whether a target holds the run's own adapters."""
        return any(isinstance(target, ADAPTER_TARGETS) for target in self.wanted)

    @property
    def model_wanted(self) -> bool:
        """Whether a target holds a whole model."""
        return not all(isinstance(target, ADAPTER_TARGETS) for target in self.wanted)
