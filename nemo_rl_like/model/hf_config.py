"""`ModelConfig`: the family-neutral shape of a decoder, from and to a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.families import FAMILIES, ExpertNames, Family
from nemo_rl_like.model.families.family import Activation
from nemo_rl_like.model.hf_attention import PLAIN_ATTENTION, AttentionConfig, AttentionReader, Scores
from nemo_rl_like.model.hf_experts import ExpertsConfig, ExpertsReader, common_divisors
from nemo_rl_like.model.hf_fields import HfFields
from nemo_rl_like.model.hf_latent import LatentConfig, LatentReader
from nemo_rl_like.model.hf_rope import RopeReader, rope_by_layer, rope_to_hf_dict
from nemo_rl_like.model.yarn import score_amplitude
from nemo_rl_like.spec.model import LinearRope, LongRope, ModelInitSpec, RopeScalingSpec
from nemo_rl_like.spec.policy import LayoutSpec

_DEFAULT_INIT_STD = 0.02
_UNQUANTISED = (
    "only unquantised weights are trained: load the model in transformers with `dequantize=True` in its quantization config (Mxfp4Config, "
    "FineGrainedFP8Config), `save_pretrained` it in bfloat16, and leave quantization_config out"
)
OTHERS = "Set `policy.backend: fsdp` for any causal language model that transformers loads (docs/backends.md)"
"""What to do about a model that Megatron's layers do not compute."""
_LOGIT_CAP = "final_logit_softcapping"
_ACTIVATIONS: Mapping[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
"""Hugging Face's names."""
QKV_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""Matrices that one product computes before attention."""
FFN_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Matrices of the feed-forward layer."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: rotary positions, grouped-query attention, and what its family is like; dense, or with experts in every layer."""

    family: str
    """Key of `FAMILIES`."""
    vocab_size: int
    """Tokens with an embedding, without padding for tensor parallelism."""
    hidden_size: int
    """Width of the residual stream, in channels."""
    intermediate_size: int
    """Width of the feed-forward layer, in channels; a model with experts has none."""
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
    """Epsilon of every norm."""
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
    rotary_share: float = 1.0
    """Share of a head's channels, from its first on, that positions turn (`partial_rotary_factor`)."""
    attention: AttentionConfig = PLAIN_ATTENTION
    """What differs from plain causal attention."""
    window_rope_theta: float | None = None
    """Base of rotary positions in layers with a window; None: they turn positions as the others do."""
    logit_cap: float | None = None
    """Logits z become cap tanh(z / cap); None: they stay."""
    experts: ExpertsConfig | None = None
    """What stands in the place of the feed-forward layer; None: a dense model."""
    latent: LatentConfig | None = None
    """What keys and values are made from, where that is narrower than they are; `head_dim` is the width of queries and keys then."""
    own_qkv_bias: bool | None = None
    """Whether queries, keys and values have a bias, where the config.json says so and not the family."""
    own_qk_norm: bool | None = None
    """Whether queries and keys have a norm, where the config.json says so and not the family."""

    @property
    def traits(self) -> Family:
        """What its family is like."""
        return FAMILIES[self.family]

    @property
    def qkv_bias(self) -> bool:
        """The query, key and value projections have a bias."""
        return self.traits.qkv_bias if self.own_qkv_bias is None else self.own_qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Queries and keys pass a norm of their own."""
        return self.traits.qk_norm if self.own_qk_norm is None else self.own_qk_norm

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that positions turn."""
        return int(self.head_dim * self.rotary_share) if self.latent is None else self.latent.rotary_width

    def scores(self, layer: int) -> Scores:
        """What a layer, counted from 0 over the whole model, makes of its attention's scores."""
        found = self.attention.scores(layer)
        if self.latent is None:
            return found
        # YaRN's temperature is a factor of queries and keys; only a part of theirs is turned by positions and carries it.
        return replace(found, scale=self.head_dim**-0.5 * score_amplitude(self.rope_scaling) ** 2)

    @property
    def ffn_width(self) -> int:
        """Width of a feed-forward layer, of an expert's where there are experts, in channels."""
        return self.intermediate_size if self.experts is None else self.experts.width

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0 over the whole model, has experts."""
        return self.experts is not None and layer >= self.experts.first_dense

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has a feed-forward part `intermediate_size` wide."""
        return not self.has_experts(0)

    @property
    def active_parameters(self) -> int:
        """Parameters of a layer's matrices that one token passes, of one with experts where there are some."""
        passed, beside = 1, 0
        if self.experts is not None:
            passed = self.experts.per_token
            beside = self.experts.count * self.hidden_size
            beside += sum(rows * columns for rows, columns in self.ffn_shapes(self.experts.shared_width).values())
        sizes = {name: outputs * inputs for name, (outputs, inputs) in self.projections.items()}
        return beside + sum(size * (passed if name in FFN_PROJECTIONS else 1) for name, size in sizes.items())

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each matrix of a layer, by Hugging Face's name; of one expert's where there are experts."""
        hidden = self.hidden_size
        if self.latent is not None:
            return {**self.latent.projections(hidden, self.heads), **self.ffn_shapes(self.ffn_width)}
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            **self.ffn_shapes(self.ffn_width),
        }

    def ffn_shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """(out, in) of each matrix of a feed-forward layer `width` channels wide, by Hugging Face's name."""
        into = dict.fromkeys(self.traits.projections, (width, self.hidden_size))
        return {**into, "down_proj": (self.hidden_size, width)}

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
            experts=_experts_from_init(spec),
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
            "hidden_act": _ACTIVATIONS[self.traits.activation],
            self.traits.activation_key: _ACTIVATIONS[self.traits.activation],
            "initializer_range": self.init_std,
            self.traits.norm_eps_key: self.norm_eps,
            **self.experts_to_hf_dict(),
            **({} if self.latent is None else self.latent.to_hf_dict(self.traits.interleave_key)),
            **self.switches_to_hf_dict(),
            **self.positions_to_hf_dict(),
            **self.attention.to_hf_dict(self.traits),
            **({_LOGIT_CAP: self.logit_cap} if self.traits.logit_caps else {}),
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
            "dtype": dtype,
            **self.traits.written,
        }

    def experts_to_hf_dict(self) -> dict[str, object]:
        """The part of a config.json that describes the experts; empty for a dense model."""
        names, experts = self.traits.experts, self.experts
        return {} if names is None or experts is None else experts.to_hf_dict(names)

    def switches_to_hf_dict(self) -> dict[str, object]:
        """The part of a config.json that says what projections have beside them, where the family leaves it open."""
        traits = self.traits
        found = {traits.qkv_bias_key: self.qkv_bias, traits.qk_norm_key: self.qk_norm}
        return {name: value for name, value in found.items() if name is not None}

    def positions_to_hf_dict(self) -> dict[str, object]:
        """The part of a config.json that says how positions turn and how far they go."""
        share = None if self.traits.rotary_share is None else self.rotary_share
        rope = rope_to_hf_dict(self.rope_theta, self.rope_scaling, share)
        if self.window_rope_theta is not None:
            rope = rope_by_layer(rope, self.window_rope_theta)
        return {"max_position_embeddings": self.max_positions, **rope}

    def head_to_hf_dict(self) -> dict[str, object]:
        """The part of a config.json that says what the model ends in."""
        if not self.score_head:
            return {"architectures": [self.traits.architecture]}
        return {
            "architectures": [self.traits.score_architecture],
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
        }

    def require_logits(self, source: str) -> None:
        """Raise InputError, which starts with `source`, unless the model ends in logits: a reward model or critic writes nothing."""
        if self.score_head:
            raise InputError(
                f"{source}: {self.traits.score_architecture} gives one score a token and no logits (a reward model or critic); "
                f"use a {self.traits.architecture}"
            )

    def require_score(self, source: str) -> None:
        """Raise InputError, which starts with `source`, unless the model ends in a score."""
        if not self.score_head:
            raise InputError(
                f"{source}: {self.traits.architecture} writes text and gives no scores; train a reward model from it (stage "
                f"`reward_model`), or use a {self.traits.score_architecture} of one label"
            )

    def check_layout(self, layout: LayoutSpec) -> None:
        """Raise InputError if this model cannot be split as `layout` asks."""
        heads = {"heads": self.heads, "kv_heads": self.kv_heads}
        widths = {**heads, **self._ffn_widths()}
        for name, value in widths.items():
            if value % layout.tp:
                raise InputError(
                    f"layout.tp is {layout.tp}, which does not divide the model's {name} ({value}); "
                    f"use tp in {common_divisors(*widths.values())}"
                )
        for name, value in heads.items():
            if value // layout.tp % layout.cp:
                raise InputError(
                    f"layout.cp is {layout.cp}, and each of its ranks attends with an equal part of the {value // layout.tp} {name} that "
                    f"tensor parallelism leaves; use cp in {common_divisors(*(x // layout.tp for x in heads.values()))}"
                )
        if layout.vpp > 1 and self.layers % layout.stages:
            fits = [v for v in range(1, self.layers + 1) if self.layers % (layout.pp * v) == 0]
            raise InputError(
                f"layout.vpp is {layout.vpp}: its {layout.pp} * {layout.vpp} stages must have the same number of the model's {self.layers} layers; "
                + (f"use vpp in {fits}" if fits else f"change pp, which does not divide {self.layers}")
            )
        if not self.layers_of_stage(layout.pp - 1, layout.pp):
            fits = [p for p in range(1, self.layers + 1) if self.layers_of_stage(p - 1, p)]
            raise InputError(
                f"layout.pp is {layout.pp}, which leaves a stage without one of the {self.layers} layers; use pp in {fits}"
            )
        if self.experts is not None:
            self.experts.check_layout(layout, self.family)

    def _ffn_widths(self) -> dict[str, int]:
        """Widths of feed-forward layers that tensor parallelism cuts."""
        experts, widths = self.experts, {}
        if self.has_dense_layers:
            widths["intermediate_size"] = self.intermediate_size
        if experts is not None and experts.shared_width:
            widths["shared expert's width"] = experts.shared_width
        return widths


def _experts_from_init(spec: ModelInitSpec) -> ExpertsConfig | None:
    if spec.experts is None:
        return None
    return ExpertsConfig(spec.experts, spec.experts_per_token, spec.intermediate_size, normalize=True)


def stretched(config: ModelConfig, scaling: RopeScalingSpec | None, max_positions: int | None) -> ModelConfig:
    """The same model with its positions stretched, to `max_positions` or to its trained context times the factor; None: as it is."""
    if scaling is None:
        return config
    kinds = FAMILIES[config.family].rope_kinds
    if scaling.kind not in kinds:
        raise InputError(
            f"model.rope_scaling.kind is {scaling.kind}, and transformers stretches the positions of a {config.family} model by "
            f"{' or '.join(kinds) or 'none of the supported kinds'}; leave rope_scaling out"
        )
    if isinstance(scaling, LongRope):
        _check_factors(scaling, config.rotary_dim, "model.rope_scaling.")
        return replace(config, rope_scaling=scaling, max_positions=max_positions or config.max_positions)
    trained = config.max_positions if isinstance(scaling, LinearRope) else scaling.original_positions
    return replace(config, rope_scaling=scaling, max_positions=max_positions or int(trained * scaling.factor))


def _check_factors(scaling: RopeScalingSpec | None, channels: int, where: str) -> None:
    """Raise InputError, which starts with `where`, unless longrope has a factor for each pair of these channels."""
    if isinstance(scaling, LongRope) and len(scaling.long_factor) != channels // 2:
        raise InputError(
            f"{where}long_factor has {len(scaling.long_factor)} numbers; positions turn {channels} channels of a head, so it needs {channels // 2}, "
            "and so does short_factor"
        )


class _Reader(HfFields):
    """Reads one Hugging Face config field by field, and refuses what would silently be ignored."""

    def config(self) -> ModelConfig:
        family = self._family()
        try:
            self._refuse_unsupported(family)
        except InputError as error:
            raise InputError(f"{error}. {OTHERS}") from error
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        layers = self.integer("num_hidden_layers")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} query heads")
        latent = None
        if family.latent:
            latent = LatentReader(self._raw, self._source).config(heads, family.interleave_key)
        head_dim = latent.head_dim if latent else self.integer("head_dim", family.head_dim or hidden // heads)
        max_positions = self.integer("max_position_embeddings", 2048)
        rope = RopeReader(self._raw, self._source)
        if family.stretched:
            rope.require()
        share = rope.share(family.rotary_share)
        if int(head_dim * share) % 2:
            raise self.error("head_dim", f"is {head_dim}, of which positions turn {share:g}; they need an even width")
        scaling = rope.scaling(max_positions, family.rope_kinds)
        _check_factors(scaling, int(head_dim * share), f"{self._source}: {rope.name}.")
        return ModelConfig(
            family=family.model_type,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size"),
            experts=self._experts(family.experts, layers),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            rope_theta=rope.theta(family.rope_theta),
            window_rope_theta=rope.window_theta(family.window_rope_theta),
            rope_scaling=scaling,
            rotary_share=share,
            attention=AttentionReader(self._raw, self._source).config(family, layers),
            logit_cap=self.positive(_LOGIT_CAP, family.logit_cap),
            norm_eps=self.number(family.norm_eps_key, family.norm_eps),
            tie_embeddings=bool(self._raw.get("tie_word_embeddings", family.tie_embeddings)),
            init_std=self.number("initializer_range", _DEFAULT_INIT_STD),
            bos_token_id=self.token_id("bos_token_id"),
            eos_token_ids=self.token_ids("eos_token_id"),
            pad_token_id=self.token_id("pad_token_id"),
            score_head=self._score_head(family),
            latent=latent,
            own_qkv_bias=self._switch(family.qkv_bias_key, family.qkv_bias),
            own_qk_norm=self._switch(family.qk_norm_key, family.qk_norm),
        )

    def _family(self) -> Family:
        name = self._raw.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            raise self.error("model_type", f"is {name!r}; supported are {', '.join(FAMILIES)}. {OTHERS}")
        family = FAMILIES[name]
        named = self._raw.get("architectures")
        supported = (family.architecture, family.score_architecture)
        if isinstance(named, list) and named and not set(supported) & set(named):
            raise self.error("architectures", f"is {named}; supported for {name} are {' and '.join(supported)}")
        return family

    def _experts(self, names: ExpertNames | None, layers: int) -> ExpertsConfig | None:
        return None if names is None else ExpertsReader(self._raw, self._source).config(names, layers)

    def _switch(self, name: str | None, default: bool) -> bool | None:
        """What the config says under a key that a family may have; None where it has none."""
        return None if name is None else bool(self._raw.get(name, default))

    def _score_head(self, family: Family) -> bool:
        named = self._raw.get("architectures")
        if not isinstance(named, list) or family.score_architecture not in named:
            return False
        labels = self._raw.get("id2label")
        if isinstance(labels, Mapping) and len(labels) != 1:
            raise self.error("id2label", f"has {len(labels)} entries; a reward model or critic has 1")
        return True

    def _refuse_unsupported(self, family: Family) -> None:
        key, activation = family.activation_key, _ACTIVATIONS[family.activation]
        if (self._raw.get(key) or activation) != activation:
            raise self.error(key, f"is {self._raw[key]!r}; only {activation!r} is supported")
        if not family.logit_caps and self._raw.get(_LOGIT_CAP) is not None:
            raise self.error(_LOGIT_CAP, f"is set; a {family.model_type} model's logits are not capped")
        for name in ("attention_bias", "mlp_bias"):
            if self._raw.get(name) and name != family.qkv_bias_key and not family.biases:
                raise self.error(name, "is true; biases beyond Qwen2's query, key and value are not supported")
        if family.biases and not self._raw.get("attention_bias", True):
            raise self.error("attention_bias", f"is false; every matrix of a {family.model_type} model has a bias")
        window = self._raw.get("sliding_window")
        counts = family.windows is None and (family.window_counts or self._raw.get("use_sliding_window"))
        if window and counts:
            raise self.error("sliding_window", f"is {window}; only full attention is supported for {family.model_type}")
        kinds = self._raw.get("layer_types")
        typed = family.windows is not None and family.windows.typed
        if not typed and isinstance(kinds, list) and set(kinds) - {"full_attention"}:
            raise self.error("layer_types", f"has {sorted(set(kinds))}; only 'full_attention' is supported")
        for name in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
            if self.number(name, 0.0):
                raise self.error(name, "is not 0; dropout is not supported")
        if self._raw.get("quantization_config"):
            raise self.error("quantization_config", f"is set; {_UNQUANTISED}")
