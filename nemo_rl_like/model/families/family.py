"""What makes a family of decoders differ from the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Norm = Literal["rms", "rms_1p", "layer_1p"]
"""RMSNorm; with weights that count from one; LayerNorm with a bias and weights that count from one."""
Score = Literal["softmax", "sigmoid"]
"""A router's: over all experts, or of each by itself."""
Activation = Literal["silu", "gelu_tanh", "relu2"]
"""Of feed-forward layers; `relu2` is the square of ReLU."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls the parts of its experts, and its config.json their numbers."""

    count: str
    """Key of the number of experts of a layer."""
    width: str
    """Key of the width of one expert's feed-forward layer."""
    block: str
    """Module of a layer that holds the router (`gate`) and `experts`."""
    projections: tuple[str, str, str]
    """An expert's gate, up and down projection."""
    normalize: str | None = None
    """Key that says whether the chosen experts' weights are made to sum to 1; None: they always are."""
    normalize_default: bool = False
    """What it says where it is absent."""
    may_normalize: bool = True
    """False: it must say no, since transformers ignores it."""
    score: Score = "softmax"
    """What the router's logits become."""
    bias: bool = False
    """A bias of each expert counts in the choice, not in the weights (`e_score_correction_bias`); the optimizer leaves it alone."""
    scale: str | None = None
    """Key of a factor of the weights."""
    groups: bool = False
    """A token may be sent to the experts of its best `topk_group` of `n_group` groups only."""
    method: str | None = None
    """Key that says whether there are groups, `group_limited_greedy`, or not, `greedy`, which is the default; None: `groups` says so."""
    group_best: int = 2
    """A group is as good as the sum of so many of its best experts."""
    router: str = "gate"
    """Module of `block` that holds the router."""
    stacked: bool = False
    """A file has one tensor of each kind for all experts of a layer: `gate_up_proj` [E, H, 2 width], whose columns alternate, and `down_proj`
    [E, width, H], with biases. Their activation is the clamped SwiGLU."""
    shared: str | None = None
    """Module of an expert that every token passes; None: there is none."""
    shared_count: str | None = None
    """Key of how many experts wide it is."""
    shared_width: str | None = None
    """Key of its width, where that is given in channels."""
    shared_gate: str | None = None
    """Module of its gate, a sigmoid of one number a token; None: it has none."""
    first_dense: str | None = None
    """Key of the number of first layers that are dense, `intermediate_size` wide; None: all have experts."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How a config.json says which layers attend within a `sliding_window`; in every layer, unless said otherwise here."""

    default: int | None = None
    """`sliding_window` of a config.json that does not say."""
    switch: bool = False
    """Only with `use_sliding_window: true`, and from layer `max_window_layers` on (Qwen)."""
    full_every: int | None = None
    """Each so-manyth layer attends to everything (Gemma)."""
    typed: bool = False
    """`layer_types` may name the layers one by one."""


@dataclass(frozen=True, slots=True)
class Family:
    """A decoder with norms, a feed-forward layer, rotary positions and grouped-query attention; Llama's, unless said otherwise here."""

    model_type: str
    """Name in config.json."""
    architecture: str
    """Hugging Face's class that ends in logits."""
    classifier: str | None = None
    """Its class that ends in one number a token, where the name is not `architecture`'s with another end."""
    qkv_bias: bool = False
    """The query, key and value projections have a bias, unless the config.json says otherwise under `qkv_bias_key`."""
    qkv_bias_key: str | None = None
    """Key that says so; None: it is the family's."""
    qk_norm: bool = False
    """Queries and keys pass an RMSNorm of their own, unless the config.json says otherwise under `qk_norm_key`."""
    qk_norm_key: str | None = None
    """Key that says so; None: it is the family's."""
    latent: bool = False
    """Keys and values of all heads are made from one narrow vector of a token (multi-head latent attention)."""
    interleave_key: str | None = None
    """With `latent`: key that says whether positions turn neighbouring channels; None: they do."""
    window_counts: bool = True
    """A `sliding_window` in the config.json of a family without `windows` means one; False: only with `use_sliding_window: true`."""
    windows: Windows | None = None
    """Layers may attend within a window; None: they all attend to everything."""
    packed: bool = False
    """A file has one tensor of queries, keys and values, one below the other, and one of gate and up (`qkv_proj`, `gate_up_proj`)."""
    rotary_share: float | None = None
    """`partial_rotary_factor` of a config.json that does not say; None: positions turn whole heads."""
    rope_kinds: tuple[str, ...] = ("linear", "llama3", "yarn")
    """How transformers can stretch its positions."""
    norm: Norm = "rms"
    """Every norm of the model."""
    norm_eps: float = 1e-6
    """Epsilon of every norm where config.json gives none."""
    norm_eps_key: str = "rms_norm_eps"
    """Key of it."""
    post_norms: bool = False
    """A norm stands behind attention and behind the feed-forward layer too, before what they give is added (Gemma)."""
    activation: Activation = "silu"
    """Of the feed-forward layer."""
    activation_key: str = "hidden_act"
    """Key of its name."""
    biases: bool = False
    """Every matrix but the embeddings has a bias: of attention, of routers and of experts."""
    sinks: bool = False
    """Each head has a score of its own beside those of keys, which takes a share of the softmax (GPT-OSS)."""
    stretched: bool = False
    """A config.json must say how positions are stretched: transformers would stretch them otherwise in a way of its own."""
    gated: bool = True
    """The feed-forward layer multiplies two projections, one of them activated; False: it activates its only one."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of their width (Gemma)."""
    tie_embeddings: bool = False
    """`tie_word_embeddings` of a config.json that does not say."""
    head_dim: int | None = None
    """Width of a head where config.json gives none; None: hidden size over heads."""
    rope_theta: float = 10000.0
    """Base of rotary positions where config.json gives none."""
    window_rope_theta: float | None = None
    """The same for layers with a window; None: they turn positions as the others do."""
    score_scalar: int | None = None
    """`query_pre_attn_scalar` of a config.json that does not say; None: there is no such key."""
    score_cap: float | None = None
    """`attn_logit_softcapping` of a config.json that does not say; None: scores are never capped."""
    logit_caps: bool = False
    """`final_logit_softcapping` is read."""
    logit_cap: float | None = None
    """What it is in a config.json that does not say."""
    experts: ExpertNames | None = None
    """Names of the experts; None: a dense model."""
    further_layers: bool = False
    """Files may hold layers behind the last one that predict later tokens; they are left out, as transformers does (DeepSeek-V3, GLM-4.5)."""
    written: Mapping[str, object] = field(default_factory=dict)
    """Further keys of a config.json that this package writes."""

    @property
    def projections(self) -> tuple[str, ...]:
        """Those into the feed-forward layer, in the order of Megatron's rows."""
        return ("gate_proj", "up_proj") if self.gated else ("up_proj",)

    @property
    def score_architecture(self) -> str:
        """The same model with one number a token in the place of logits: reward models and critics."""
        return self.classifier or self.architecture.replace("ForCausalLM", "ForSequenceClassification")
