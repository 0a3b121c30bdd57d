"""What makes a family of decoders differ from the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class Family:
    """A decoder with RMSNorm, SwiGLU, rotary positions and grouped-query attention."""

    model_type: str
    """Name in config.json."""
    architecture: str
    """Hugging Face's class that ends in logits."""
    qkv_bias: bool = False
    """The query, key and value projections have a bias."""
    qk_norm: bool = False
    """Queries and keys pass an RMSNorm of their own."""
    window_counts: bool = True
    """A `sliding_window` in config.json is attended within; False: only with `use_sliding_window: true` (Qwen)."""
    default_window: int | None = None
    """`sliding_window` of a config.json that does not say."""
    packed: bool = False
    """A file has one tensor of queries, keys and values, one below the other, and one of gate and up (`qkv_proj`, `gate_up_proj`)."""
    rotary_share: float | None = None
    """`partial_rotary_factor` of a config.json that does not say; None: positions turn whole heads."""
    rope_kinds: tuple[str, ...] = ("linear", "llama3", "yarn")
    """How transformers can stretch its positions."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm where config.json gives none."""
    experts: ExpertNames | None = None
    """Names of the experts; None: a dense model."""
    written: Mapping[str, object] = field(default_factory=dict)
    """Further keys of a config.json that this package writes."""

    @property
    def score_architecture(self) -> str:
        """The same model with one number a token in the place of logits: reward models and critics."""
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")
