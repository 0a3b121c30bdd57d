"""Bytes of one layer's feed-forward part on one rank, dense or of experts, counted without torch; see `model.activations`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nemo_rl_like.model.attention_activations import Layers
from nemo_rl_like.model.hf_experts import ExpertsConfig
from nemo_rl_like.model.pass_sizes import FLOAT32, INT64, PassSizes
from nemo_rl_like.spec.policy import Module


@dataclass(frozen=True, slots=True)
class DenseActivations:
    """Two products and what is between them."""

    sizes: PassSizes
    layers: Layers
    module: ClassVar[Module] = "mlp"

    @property
    def width(self) -> int:
        """Of this rank's part of the layer."""
        return self.sizes.config.intermediate_size // self.sizes.layout.tp

    def kept(self) -> int:
        """What autograd keeps beyond its input."""
        # SwiGlu, GeGlu: gate and up, SquaredRelu: its input; _Linear (linear_fc2): what they give. Megatron's own also saves silu(gate) and a
        # copy of up.
        gated = self.sizes.config.traits.gated
        widths = 2 + gated if self.layers == "local" else 3 + 2 * gated
        return self.sizes.tokens * widths * self.width * self.sizes.itemsize

    def moments(self) -> tuple[int, ...]:
        """What its backward pass adds to the bytes kept, beside the gradient of its output: in the activation, and in linear_fc1."""
        return self._between(), self._first_linear()

    def _between(self) -> int:
        """linear_fc2 has given back its input. GeGlu puts two halves of its gradient together."""
        traits = self.sizes.config.traits
        widths = 1 if not traits.gated else 4 if traits.activation == "gelu_tanh" else 2
        return widths * self.sizes.tokens * self.width * self.sizes.itemsize

    def _first_linear(self) -> int:
        """It gathers its input once more under sequence parallelism; what follows it is gone."""
        sizes, hidden = self.sizes, self.sizes.config.hidden_size
        inner = sizes.tokens * self.width * sizes.itemsize
        whole = sizes.tokens * hidden * sizes.itemsize
        gathered = whole + sizes.residual if sizes.layout.sp else 0
        columns = 1 + sizes.config.traits.gated
        to_weight = 0  # added straight to a float32 buffer of the weight's own type
        if sizes.itemsize != FLOAT32:
            to_weight = columns * self.width * hidden * sizes.itemsize
        return whole + gathered + to_weight - inner


@dataclass(frozen=True, slots=True)
class ExpertActivations:
    """Router, the tokens of this rank's experts if they spread evenly, and the expert that every token passes."""

    sizes: PassSizes
    layers: Layers
    experts: ExpertsConfig
    module: ClassVar[Module] = "moe"

    @property
    def width(self) -> int:
        """Of this rank's part of an expert."""
        return self.experts.width // self.sizes.layout.expert_tp

    @property
    def gated(self) -> bool:
        """Whether the shared expert has a gate."""
        names = self.sizes.config.traits.experts
        return names is not None and names.shared_gate is not None and self.experts.shared_width > 0

    def kept(self) -> int:
        """What autograd keeps beyond its input."""
        sizes = self.sizes
        tokens = sizes.routed + self._of_pairs()
        weights = sizes.pairs * (FLOAT32 + INT64)  # `permute`: weights and the token of each place
        return tokens + weights + sizes.part * self._choice() + self._shared()

    def _of_pairs(self) -> int:
        """What the experts keep beyond the tokens sent to them."""
        sizes = self.sizes
        if self.experts.swiglu is not None and self.layers == "local":
            # clamped_swiglu: both, the gate, its sigmoid, their product, up + 1; what it gives; the output, for the token's weight.
            return sizes.pairs * 7 * self.width * sizes.itemsize + sizes.routed
        # Gate and up, product, product times the token's weight; Megatron's own: two more, as in `DenseActivations`.
        per_expert = 4 if self.layers == "local" else 6
        return sizes.pairs * per_expert * self.width * sizes.itemsize

    def _choice(self) -> int:
        """Bytes of a token's choice."""
        experts, names = self.experts, self.sizes.config.traits.experts
        chosen = experts.per_token * (
            FLOAT32 + INT64
        )  # softmax's output, or weights before they are made to sum to 1; topk's indices
        # By token and expert: a transposed copy of the weights (masked_select), two masks of one byte; scores of all experts, where they are not of
        # the chosen ones alone.
        of_all = names is not None and (names.score == "sigmoid" or experts.groups > 1 or experts.scale != 1)
        scores = of_all or not experts.normalize
        return chosen + experts.count * (FLOAT32 + 2 + FLOAT32 * scores) + FLOAT32 * of_all

    def _shared(self) -> int:
        """The expert that every token passes: as a dense layer; a gate keeps what it multiplies."""
        sizes = self.sizes
        if not self.experts.shared_width:
            return 0
        widths = 3 if self.layers == "local" else 5
        inner = sizes.tokens * widths * (self.experts.shared_width // sizes.layout.tp) * sizes.itemsize
        return inner + self.gated * (sizes.residual + sizes.part * sizes.itemsize)

    def moments(self) -> tuple[int, ...]:
        """What its backward pass, or its forward one, adds to the bytes kept, beside the gradient of its output."""
        sizes = self.sizes
        # Gradients of the experts' outputs, before and after they are sorted.
        sorting = 2 * sizes.routed
        # In the forward pass: tokens before they are sent and as they arrive, the outputs of single experts, and put together.
        joining = (2 + (sizes.layout.ep > 1) + (self.layers == "local")) * sizes.routed
        beside = sizes.residual * (self.experts.shared_width > 0)  # what the shared expert gave waits to be added
        return sorting, self._one_expert(), self._all_matrices(), joining + beside - sizes.residual

    def _all_matrices(self) -> int:
        """Where they lie in one tensor of each kind, those of all experts are put together when all have been made."""
        if self.experts.swiglu is None or self.layers == "transformer_engine":
            return 0
        return self.sizes.routed + 4 * self._matrices() - self._of_pairs()

    def _matrices(self) -> int:
        """Bytes of a third of the experts' matrices."""
        held = self.experts.count // self.sizes.layout.ep
        return held * self.width * self.sizes.config.hidden_size * self.sizes.itemsize

    def _one_expert(self) -> int:
        """One expert's backward, beside the gradients of all outputs."""
        sizes, local = self.sizes, self.experts.count // self.sizes.layout.ep
        each = -(-sizes.pairs // local)
        if self.experts.swiglu is not None and self.layers == "local":
            # Gradients of all matrices wait for the last expert's.
            return sizes.routed + each * 4 * self.width * sizes.itemsize + 3 * self._matrices()
        # The product with the token's weight has three float32 tensors, and linear_fc2 has given back its input.
        return sizes.routed + each * self.width * (3 * FLOAT32 - sizes.itemsize)
