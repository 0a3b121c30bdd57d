"""`ModelConfig`: the family-neutral shape of a dense decoder, from and to a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.families import FAMILIES, Family
from nemo_rl_like.model.hf_rope import RopeReader, rope_to_hf_dict
from nemo_rl_like.spec.model import LinearRope, ModelInitSpec, RopeScalingSpec
from nemo_rl_like.spec.policy import Fp8Spec, LayoutSpec

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig

_DEFAULT_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder: RMSNorm, SwiGLU, rotary positions, grouped-query attention."""

    family: str
    """Key of `FAMILIES`."""
    vocab_size: int
    """Tokens with an embedding, without padding for tensor parallelism."""
    hidden_size: int
    """Width of the residual stream, in channels."""
    intermediate_size: int
    """Width of the feed-forward layer, in channels."""
    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of one head, in channels."""
    max_positions: int
    """Longest context, in tokens."""
    rope_theta: float
    """Base of the rotary position embedding."""
    norm_eps: float
    """Epsilon of every RMSNorm."""
    tie_embeddings: bool
    """The output head is the input embedding."""
    init_std: float = _DEFAULT_INIT_STD
    """Standard deviation of weights made from scratch."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    rope_scaling: RopeScalingSpec | None = None
    """How positions are stretched beyond the trained context."""
    score_head: bool = False
    """One number a token in the place of logits (a reward model or a critic); the output head is then gone."""

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias (Qwen2)."""
        return FAMILIES[self.family].qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys pass an RMSNorm of their own (Qwen3)."""
        return FAMILIES[self.family].qk_norm

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each matrix of a layer, by Hugging Face's name."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }

    def padded_vocab(self, tp: int) -> int:
        """The vocabulary rounded up to a multiple of `tp` ranks."""
        return -(-self.vocab_size // tp) * tp

    def layers_of_stage(self, stage: int, pp: int) -> range:
        """Global indices of the layers on one of `pp` pipeline stages: equal counts, the last stage may have fewer."""
        each = -(-self.layers // pp)
        return range(stage * each, min((stage + 1) * each, self.layers))

    @classmethod
    def from_hf_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `folder`/config.json. Raises InputError if it is missing, not JSON or describes an unsupported model."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise InputError(f"{path} does not exist; a Hugging Face model folder needs a config.json")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path} is not valid JSON: {error}") from error
        return cls.from_hf_dict(raw, source=str(path))

    @classmethod
    def from_hf_dict(cls, raw: Mapping[str, object], source: str = "config.json") -> ModelConfig:
        """The shape described by a Hugging Face config. Raises InputError naming the field that is not supported."""
        return _Reader(raw, source).config()

    @classmethod
    def from_init(cls, spec: ModelInitSpec, vocab_size: int) -> ModelConfig:
        """The shape of a model made from scratch for a tokenizer of `vocab_size` tokens."""
        return cls(
            family=spec.family,
            vocab_size=vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_positions=spec.max_positions,
            rope_theta=spec.rope_theta,
            norm_eps=FAMILIES[spec.family].norm_eps,
            tie_embeddings=spec.tie_embeddings,
        )

    def to_hf_dict(self, dtype: str = "float32") -> dict[str, object]:
        """A config.json that transformers 4 and 5 both read the same way."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return {
            **self.head_to_hf_dict(),
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "initializer_range": self.init_std,
            "rms_norm_eps": self.norm_eps,
            **self.positions_to_hf_dict(),
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
            "dtype": dtype,
            **FAMILIES[self.family].written,
        }

    def positions_to_hf_dict(self) -> dict[str, object]:
        """The part of a config.json that says how positions turn and how far they go."""
        return {
            "max_position_embeddings": self.max_positions,
            **rope_to_hf_dict(self.rope_theta, self.rope_scaling),
        }

    def head_to_hf_dict(self) -> dict[str, object]:
        """The part of a config.json that says what the model ends in."""
        if not self.score_head:
            return {"architectures": [FAMILIES[self.family].architecture]}
        return {
            "architectures": [FAMILIES[self.family].score_architecture],
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
        }

    def require_logits(self, source: str) -> None:
        """Raise InputError, which starts with `source`, unless the model ends in logits: a reward model or critic writes nothing."""
        if self.score_head:
            raise InputError(
                f"{source}: {FAMILIES[self.family].score_architecture} gives one score a token and no logits (a reward model or critic); "
                f"use a {FAMILIES[self.family].architecture}"
            )

    def require_score(self, source: str) -> None:
        """Raise InputError, which starts with `source`, unless the model ends in a score."""
        if not self.score_head:
            raise InputError(
                f"{source}: {FAMILIES[self.family].architecture} writes text and gives no scores; train a reward model from it (stage "
                f"`reward_model`), or use a {FAMILIES[self.family].score_architecture} of one label"
            )

    def check_layout(self, layout: LayoutSpec) -> None:
        """Raise InputError if this model cannot be split as `layout` asks."""
        for name, value in (
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("intermediate_size", self.intermediate_size),
        ):
            if value % layout.tp:
                raise InputError(
                    f"layout.tp is {layout.tp}, which does not divide the model's {name} ({value}); "
                    f"use tp in {_common_divisors(self.heads, self.kv_heads, self.intermediate_size)}"
                )
        if not self.layers_of_stage(layout.pp - 1, layout.pp):
            fits = [p for p in range(1, self.layers + 1) if self.layers_of_stage(p - 1, p)]
            raise InputError(
                f"layout.pp is {layout.pp}, which leaves a stage without one of the {self.layers} layers; use pp in {fits}"
            )


def stretched(config: ModelConfig, scaling: RopeScalingSpec | None, max_positions: int | None) -> ModelConfig:
    """The same model with its positions stretched, to `max_positions` or to its trained context times the factor; None: as it is."""
    if scaling is None:
        return config
    trained = config.max_positions if isinstance(scaling, LinearRope) else scaling.original_positions
    return replace(config, rope_scaling=scaling, max_positions=max_positions or int(trained * scaling.factor))


def transformer_config(
    config: ModelConfig, layout: LayoutSpec, dtype: torch.dtype, fp8: Fp8Spec | None = None
) -> TransformerConfig:
    """Megatron's description of the model on `layout`, without weights' initialisation.

    Raises InputError if the model cannot be split that way.
    """
    from torch.nn import functional

    from nemo_rl_like.model.mcore import TransformerConfig
    from nemo_rl_like.model.runtime import on_cuda, quiet

    config.check_layout(layout)
    last = len(config.layers_of_stage(layout.pp - 1, layout.pp))
    uneven = layout.pp > 1 and config.layers % layout.pp != 0
    with quiet():
        return TransformerConfig(
            num_layers=config.layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.heads,
            num_query_groups=config.kv_heads,
            kv_channels=config.head_dim,
            ffn_hidden_size=config.intermediate_size,
            normalization="RMSNorm",
            layernorm_epsilon=config.norm_eps,
            gated_linear_unit=True,
            activation_func=functional.silu,
            add_bias_linear=False,
            add_qkv_bias=config.qkv_bias,
            qk_layernorm=config.qk_norm,
            init_method_std=config.init_std,
            perform_initialization=False,
            use_cpu_initialization=not on_cuda(),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attention_softmax_in_fp32=True,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype.itemsize == 2,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            num_layers_in_last_pipeline_stage=last if uneven else None,
            sequence_parallel=layout.sp,
            variable_seq_lengths=layout.pp > 1,
            moe_token_dispatcher_type="alltoall",  # Megatron asks for it with variable lengths, in dense models too
            batch_p2p_comm=False,
            **_fp8_settings(fp8),
        )


def _fp8_settings(fp8: Fp8Spec | None) -> dict[str, Any]:
    if fp8 is None:
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": fp8.first_bf16_layers + fp8.last_bf16_layers > 0,
        "num_layers_at_start_in_bf16": fp8.first_bf16_layers,
        "num_layers_at_end_in_bf16": fp8.last_bf16_layers,
        # A kept FP8 copy of a weight would be stale in the engine, which decodes outside Megatron's schedules.
        "disable_parameter_transpose_cache": True,
    }


class _Reader:
    """Reads one Hugging Face config field by field, and refuses what would silently be ignored."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        self._raw, self._source = raw, source

    def config(self) -> ModelConfig:
        family = self._family()
        self._refuse_unsupported(family)
        heads, hidden = self._int("num_attention_heads"), self._int("hidden_size")
        kv_heads = self._int("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._error("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} query heads")
        head_dim = self._int("head_dim", hidden // heads)
        if head_dim % 2:
            raise self._error("head_dim", f"is {head_dim}; rotary positions need an even width")
        max_positions = self._int("max_position_embeddings", 2048)
        rope = RopeReader(self._raw, self._source)
        return ModelConfig(
            family=family.model_type,
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._int("intermediate_size"),
            layers=self._int("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            rope_theta=rope.theta(),
            rope_scaling=rope.scaling(max_positions),
            norm_eps=self._float("rms_norm_eps", family.norm_eps),
            tie_embeddings=bool(self._raw.get("tie_word_embeddings", False)),
            init_std=self._float("initializer_range", _DEFAULT_INIT_STD),
            bos_token_id=self._token_id("bos_token_id"),
            eos_token_ids=self._token_ids("eos_token_id"),
            pad_token_id=self._token_id("pad_token_id"),
            score_head=self._score_head(family),
        )

    def _family(self) -> Family:
        name = self._raw.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            raise self._error("model_type", f"is {name!r}; supported are {', '.join(FAMILIES)} (dense decoders)")
        family = FAMILIES[name]
        named = self._raw.get("architectures")
        supported = (family.architecture, family.score_architecture)
        if isinstance(named, list) and named and not set(supported) & set(named):
            raise self._error("architectures", f"is {named}; supported for {name} are {' and '.join(supported)}")
        return family

    def _score_head(self, family: Family) -> bool:
        named = self._raw.get("architectures")
        if not isinstance(named, list) or family.score_architecture not in named:
            return False
        labels = self._raw.get("id2label")
        if isinstance(labels, Mapping) and len(labels) != 1:
            raise self._error("id2label", f"has {len(labels)} entries; a reward model or critic has 1")
        return True

    def _refuse_unsupported(self, family: Family) -> None:
        if self._raw.get("hidden_act", "silu") != "silu":
            raise self._error("hidden_act", f"is {self._raw['hidden_act']!r}; only 'silu' is supported")
        for name in ("attention_bias", "mlp_bias"):
            if self._raw.get(name):
                raise self._error(name, "is true; biases beyond Qwen2's query, key and value are not supported")
        window = self._raw.get("sliding_window", family.default_window)
        if window and (family.window_counts or self._raw.get("use_sliding_window")):
            raise self._error("sliding_window", f"is {window}; only full attention is supported")
        kinds = self._raw.get("layer_types")
        if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
            raise self._error("layer_types", f"has {sorted(set(kinds))}; only 'full_attention' is supported")
        if self._float("attention_dropout", 0.0):
            raise self._error("attention_dropout", "is not 0; dropout is not supported")
        if self._raw.get("quantization_config"):
            raise self._error("quantization_config", "is set; load unquantised weights")

    def _int(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(name, f"is {value!r}; expected a positive integer")
        return value

    def _float(self, name: str, default: float) -> float:
        value = self._raw.get(name)
        return default if value is None else _number(value, self._error(name, f"is {value!r}; expected a number"))

    def _token_ids(self, name: str) -> tuple[int, ...]:
        value = self._raw.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) for i in ids):
            raise self._error(name, f"is {value!r}; expected a token id or a list of token ids")
        return tuple(ids)

    def _token_id(self, name: str) -> int | None:
        ids = self._token_ids(name)
        return ids[0] if ids else None

    def _error(self, name: str, what: str) -> InputError:
        return InputError(f"{self._source}: {name} {what}")


def _number(value: object, error: InputError) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise error
    return float(value)


def _common_divisors(*values: int) -> list[int]:
    return [d for d in range(1, min(values) + 1) if all(v % d == 0 for v in values)]
