"""The engine block: what samples from the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.model import DType


class EngineSpec(Spec):
    """What samples from the policy."""

    kind: Literal["embedded", "vllm"] = "embedded"
    """`embedded` decodes on the policy's own weights; `vllm` runs vLLM beside it."""
    replicas: PositiveInt = 1
    """vLLM replicas."""
    tensor_parallel: PositiveInt = 1
    """Processes (GPUs) that share the model of one vLLM replica; must divide the model's heads."""
    max_context: PositiveInt | None = None
    """Longest prompt plus response, in tokens; default: the model's."""
    max_batch_rows: PositiveInt = 256
    """Rows decoded at once."""
    dtype: DType | None = None
    """vLLM's type; default: the model's."""
    quantization: Literal["fp8_per_tensor", "fp8_per_block"] | None = None
    """vLLM's linear layers and experts in FP8, quantised when weights arrive, at each sync again (an NVIDIA GPU, a 16-bit `dtype`): one factor
    a tensor, or one a block of 128 x 128; default: off."""
    kv_cache_gib: PositiveFloat = 0.5
    """vLLM's KV cache, in GiB."""
    enforce_eager: bool = True
    """vLLM without compilation: slower decode, much faster start."""
    threads: NonNegativeInt = 0
    """vLLM's CPU threads; 0 = all cores."""
    probe_prompts: PositiveInt = 8
    """Prompts whose log-probs are compared between engine and trainer after each weight sync."""
    probe_tokens: PositiveInt = 64
    """Length of one probe prompt, in tokens; one less than the context if that is shorter."""
    max_gap_p99: PositiveFloat | None = None
    """Largest 99 % quantile of |engine - trainer| log-prob, in nats; default: 0.001 if both compute in float32, else 0.3."""

    def gap_limit(self, model_dtype: DType) -> float:
        """`max_gap_p99`, or its default for a trainer that computes in `model_dtype`; in nats."""
        exact = model_dtype == "float32" and self.dtype in (None, "float32") and self.quantization is None
        return self.max_gap_p99 or (1e-3 if exact else 0.3)
