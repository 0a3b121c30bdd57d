"""The experts of a model, from and to a Hugging Face `config.json`: how many, how a token gets to them, and what every token passes."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.families import ExpertNames
from nemo_rl_like.model.hf_fields import HfFields
from nemo_rl_like.spec.policy import LayoutSpec

_GROUPS, _GROUPS_PER_TOKEN, _PER_TOKEN = "n_group", "topk_group", "num_experts_per_tok"

_ALPHA, _LIMIT = "swiglu_alpha", "swiglu_limit"
_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """gate sigmoid(alpha gate) (up + 1) with gate <= limit and |up| <= limit (GPT-OSS, arXiv 2508.10925)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The feed-forward layers of which a router chooses some for each token."""

    count: int
    """Experts of a layer."""
    per_token: int
    """Experts that a token passes."""
    width: int
    """Width of one expert's feed-forward layer, in channels."""
    normalize: bool
    """The weights of a token's experts are made to sum to 1."""
    scale: float = 1.0
    """Factor of the weights, after that."""
    groups: int = 1
    """Equal groups of neighbouring experts."""
    groups_per_token: int = 1
    """Groups whose experts a token may pass."""
    shared_width: int = 0
    """Width of the expert that every token passes, in channels; 0: there is none."""
    first_dense: int = 0
    """First layers that are dense, `intermediate_size` wide."""
    swiglu: ClampedSwiGlu | None = None
    """Of experts that lie in one tensor; None: the family's activation."""

    @property
    def alone(self) -> bool:
        """Whether no feed-forward layer is dense or shared."""
        return not self.shared_width and not self.first_dense

    def to_hf_dict(self, names: ExpertNames) -> dict[str, object]:
        """The part of a config.json that says so, in the words of a family."""
        found: dict[str, object] = {names.count: self.count, _PER_TOKEN: self.per_token, names.width: self.width}
        if names.normalize is not None:
            found[names.normalize] = self.normalize
        if names.scale is not None:
            found[names.scale] = self.scale
        if names.method is not None:
            found[names.method] = _METHODS[self.groups > 1]
        if names.groups:
            found |= {_GROUPS: self.groups, _GROUPS_PER_TOKEN: self.groups_per_token}
        if names.shared_count is not None:
            found[names.shared_count] = self.shared_width // self.width
        if names.shared_width is not None:
            found[names.shared_width] = self.shared_width
        if names.first_dense is not None:
            found[names.first_dense] = self.first_dense
        if self.swiglu is not None:
            found |= {_ALPHA: self.swiglu.alpha, _LIMIT: self.swiglu.limit}
        return found

    def check_layout(self, layout: LayoutSpec, family: str) -> None:
        """Raise InputError if the experts of a model of this family cannot be spread as `layout` asks."""
        if self.count % layout.ep:
            raise InputError(
                f"layout.ep is {layout.ep}, which does not divide the model's {self.count} experts; "
                f"use ep in {common_divisors(self.count)}"
            )
        if self.width % layout.expert_tp:
            raise InputError(
                f"layout.etp is {layout.expert_tp} (default: tp), which does not divide the width of an expert ({self.width}); "
                f"use etp in {common_divisors(self.width)}"
            )
        if self.swiglu is not None and layout.expert_tp > 1:
            raise InputError(
                f"layout.etp is {layout.expert_tp} (default: tp), and the biases of a {family} model's experts are whole on every rank; "
                "set `etp: 1`"
            )
        if layout.tp > 1 and not layout.sp:
            raise InputError(
                f"layout.tp is {layout.tp} with layout.sp false: each of the tensor-parallel ranks would send every token to the experts; "
                "set `sp: true`"
            )


class ExpertsReader(HfFields):
    """Reads what a config says of experts."""

    def config(self, names: ExpertNames, layers: int) -> ExpertsConfig:
        """Of a model of so many layers. Raises InputError naming the field that is not supported."""
        count = self.integer("num_local_experts" if names.count not in self._raw else names.count)
        per_token = self.integer(_PER_TOKEN)
        if per_token > count:
            raise self.error(_PER_TOKEN, f"is {per_token}, more than the {count} experts")
        normalize = True
        if names.normalize is not None:
            normalize = bool(self._raw.get(names.normalize, names.normalize_default))
        if normalize and not names.may_normalize:
            raise self.error(str(names.normalize), "is true, which transformers ignores; set it to false")
        if normalize and per_token == 1:
            raise self.error(_PER_TOKEN, "is 1, so the weight of a token's expert would always be 1")
        self._refuse_unsupported(names)
        width = self.integer(names.width)
        groups, groups_per_token = self._groups(names, count, per_token)
        return ExpertsConfig(
            count,
            per_token,
            width,
            normalize,
            scale=1.0 if names.scale is None else self.number(names.scale, 1.0),
            groups=groups,
            groups_per_token=groups_per_token,
            shared_width=self._shared_width(names, width),
            swiglu=self._swiglu() if names.stacked else None,
            first_dense=0 if names.first_dense is None else self._first_dense(names.first_dense, layers),
        )

    def _groups(self, names: ExpertNames, count: int, per_token: int) -> tuple[int, int]:
        """How many groups there are, and how many of them a token's experts may be in."""
        if not names.groups or (names.method is not None and not self._grouped(names.method)):
            return 1, 1
        groups = self.integer(_GROUPS, 1)
        chosen = self.integer(_GROUPS_PER_TOKEN, groups)
        if count % groups or count // groups < names.group_best:
            raise self.error(
                _GROUPS,
                f"is {groups}, which does not divide the {count} experts into groups of {names.group_best} or more",
            )
        if chosen > groups or per_token > count // groups * chosen:
            raise self.error(
                _GROUPS_PER_TOKEN,
                f"is {chosen} of {groups} groups, which have too few of the {count} experts for {per_token} a token",
            )
        return groups, chosen

    def _swiglu(self) -> ClampedSwiGlu:
        limit = self.positive(_LIMIT, 7.0)
        if limit is None:
            raise self.error(_LIMIT, "is null; the experts' SwiGLU is clamped")
        return ClampedSwiGlu(self.number(_ALPHA, 1.702), limit)

    def _grouped(self, name: str) -> bool:
        method = self._raw.get(name, _METHODS[0])
        if method not in _METHODS:
            raise self.error(name, f"is {method!r}; supported are {' and '.join(_METHODS)}")
        return method == _METHODS[1]

    def _shared_width(self, names: ExpertNames, width: int) -> int:
        if names.shared_count is not None:
            return self.integer(names.shared_count, 1) * width
        return 0 if names.shared_width is None else self.integer(names.shared_width)

    def _first_dense(self, name: str, layers: int) -> int:
        value = self._raw.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < layers:
            raise self.error(name, f"is {value!r}; expected less than the {layers} layers")
        return value

    def _refuse_unsupported(self, names: ExpertNames) -> None:
        for name in ("decoder_sparse_step", "moe_layer_freq"):
            if self._raw.get(name, 1) != 1:
                raise self.error(name, "is not 1; only experts in every layer are supported")
        if self._raw.get("mlp_only_layers"):
            raise self.error("mlp_only_layers", "is not empty; only experts in every layer are supported")
        if self.number("router_jitter_noise", 0.0):
            raise self.error("router_jitter_noise", "is not 0; noise is not supported")
        if self._raw.get("scoring_func", names.score) != names.score:
            raise self.error("scoring_func", f"is {self._raw['scoring_func']!r}; only {names.score!r} is supported")


def common_divisors(*values: int) -> list[int]:
    """Numbers that divide all of these."""
    return [d for d in range(1, min(values) + 1) if all(v % d == 0 for v in values)]
