"""The policy block: layout, rows and precision of the trainable model."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.base import Spec


class LayoutSpec(Spec):
    """How the model is split over ranks; world size = dp * pp * cp * tp."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel stages."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages on each pipeline-parallel rank: an interleaved schedule, in which ranks wait less and send more."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each has 1 / cp of every sequence, and for attention 1 / cp of the heads of the whole one."""
    dp: PositiveInt = 1
    """Data-parallel ranks."""
    ep: PositiveInt = 1
    """Expert-parallel ranks: each holds 1 / ep of every layer's experts, and tokens travel to theirs. They are taken from the `dp * cp * tp`
    ranks of a pipeline stage."""
    etp: PositiveInt | None = None
    """Tensor-parallel ranks of one expert; default: `tp`."""
    sp: bool = False
    """Sequence parallelism: each of the `tp` ranks keeps a part of the sequence between its linear layers, so that residuals and norms take
    1 / tp of the memory."""

    @model_validator(mode="after")
    def _has_ranks_to_share(self) -> LayoutSpec:
        if self.sp and self.tp == 1:
            raise ValueError(
                "`sp` shares sequences among the tensor-parallel ranks, and `tp` is 1; leave it out, or raise `tp`"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                "`vpp` gives each pipeline-parallel rank several stages, and `pp` is 1; leave it out, or raise `pp`"
            )
        if self.stage_ranks % (self.ep * self.expert_tp):
            raise ValueError(
                f"`ep` * `etp` is {self.ep} * {self.expert_tp}, which does not divide `dp` * `cp` * `tp` ({self.dp} * {self.cp} * {self.tp}); "
                "lower `ep`, set `etp: 1`, or raise `dp`"
            )
        return self

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.pp * self.stage_ranks

    @property
    def stages(self) -> int:
        """Pipeline stages; stage s is on pipeline-parallel rank s % pp."""
        return self.pp * self.vpp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of one expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.stage_ranks // (self.ep * self.expert_tp)

    @property
    def experts_cross_replicas(self) -> bool:
        """Whether a token may have to travel to another data-parallel rank."""
        return self.ep * self.expert_tp > self.cp * self.tp


class Fp8Spec(Spec):
    """Linear layers computed in FP8 by Transformer Engine; attention, embeddings and the head stay in the model's type."""

    recipe: Literal["tensorwise", "blockwise", "mxfp8", "delayed"] = "tensorwise"
    """How values are scaled: one factor a tensor, one a block of 128, or one a block of 32 (Blackwell GPUs); `delayed`: one a tensor, from the
    largest values of past steps (Micikevicius et al. 2022, arXiv 2209.05433, sec. 3)."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """`hybrid`: E4M3 forward and E5M2 gradients; `e4m3` for both."""
    first_bf16_layers: NonNegativeInt = 0
    """Layers at the start that stay in bfloat16."""
    last_bf16_layers: NonNegativeInt = 0
    """Layers at the end that stay in bfloat16."""
    parameters: bool = False
    """Keep the linear layers' weights in FP8 alone, and gather them in it (`tensorwise`, `blockwise`); default: in the model's type, rounded for
    each product. The optimizer's master copies are float32 either way."""
    amax_history_len: PositiveInt = 1024
    """With `delayed`: past steps whose largest values are kept, in passes of a layer."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """With `delayed`: which of those sets the factor."""
    margin: NonNegativeInt = 0
    """With `delayed`: the factor leaves room for values 2^margin times as large."""

    @model_validator(mode="after")
    def _fields_of_recipe(self) -> Fp8Spec:
        if self.recipe != "delayed":
            changed = {
                "amax_compute_algo": self.amax_compute_algo != "max",
                "amax_history_len": self.amax_history_len != 1024,
                "margin": self.margin != 0,
            }
            given = [name for name, differs in changed.items() if differs]
            if given:
                raise ValueError(f"`{given[0]}` goes with `recipe: delayed`; leave it out, or set that recipe")
        elif self.first_bf16_layers or self.last_bf16_layers:
            raise ValueError(
                "`recipe: delayed` scales all layers in one context, so none stays in bfloat16; leave `first_bf16_layers` and "
                "`last_bf16_layers` out, or use another recipe"
            )
        if self.parameters and self.recipe not in ("tensorwise", "blockwise"):
            raise ValueError(
                f"`parameters` is for `recipe: tensorwise` and `blockwise`, and `recipe` is {self.recipe}; leave one of them out"
            )
        return self


class RouterSpec(Spec):
    """What keeps the load of a model's experts even: losses of each training step, for every row and layer alike, or biases."""

    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of the loss that is least when a row's tokens use all experts alike (DeepSeek-V3, arXiv 2412.19437)."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the squared log-normaliser of the router's logits (ST-MoE, arXiv 2202.08906)."""
    bias_update_rate: NonNegativeFloat = 0.0
    """What each expert's bias moves by after a step, in models that have one (Wang et al. 2024, arXiv 2408.15664); DeepSeek-V3 was trained
    with 0.001. 0: biases stay."""
    replay: Literal["none", "first_pass", "engine"] = "none"
    """`first_pass`: the updates of an `rl` stage's step send each token to the experts of the pass that told its proximal log-prob, however the
    router would choose by then (arXiv 2507.18071). `engine`: that pass and the updates send it to the experts that the engine sent it to when it
    was sampled (arXiv 2510.11370), which `engine.kind: embedded` tells; tokens that the engine never read go as with `first_pass`."""

    @property
    def has_losses(self) -> bool:
        """Whether a step adds any."""
        return self.balance_loss > 0 or self.z_loss > 0


Module = Literal["core_attn", "mlp", "moe"]


class RecomputeSpec(Spec):
    """Activations that are not kept for the backward pass, which computes them again: less memory for more work."""

    kind: Literal["full", "selective"] = "full"
    """`full`: all of a layer but its input; `selective`: the activations inside some modules."""
    layers: PositiveInt | None = None
    """With `full`: this many layers of every pipeline stage, from its start; default: all."""
    modules: Annotated[tuple[Module, ...], Field(min_length=1)] = ("core_attn",)
    """With `selective`: the attention between the projections, the feed-forward layer, the layer of experts."""

    @model_validator(mode="after")
    def _fields_of_kind(self) -> RecomputeSpec:
        if self.kind == "selective" and self.layers is not None:
            raise ValueError("`layers` goes with `kind: full`; `selective` takes `modules`, in every layer")
        if self.kind == "full" and self.modules != ("core_attn",):
            raise ValueError("`modules` goes with `kind: selective`; `full` takes `layers`")
        return self


class OffloadSpec(Spec):
    """What waits in host memory while the GPU does not need it (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840)."""

    optimizer: bool = False
    """Master weights and moments live in host memory, and the step runs there; the critic's too. For `adamw` and `sgd`."""
    frozen: bool = False
    """Reference, teacher and reward models lie in host memory but for their passes."""


Plain = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Latent = Literal["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
Stacked = Literal["gate_up_proj"]
Projection = Plain | Latent | Stacked


class Nf4Spec(Spec):
    """Frozen matrices in 4 bits, in blocks of 64 inputs that share a scale (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""

    kind: Literal["nf4"] = "nf4"
    """4-bit NormalFloat."""
    double: bool = True
    """Hold the scales in 8 bits, so that a value takes 4.13 bits; false: in float32, 4.5 bits."""


class LoraSpec(Spec):
    """Low-rank adapters: the model stays as it is, and only W + scale B A changes (Hu et al. 2021, arXiv 2106.09685)."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The product B A is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that large ranks learn as fast (Kalajdzievski 2023, arXiv 2312.03732)."""
    dora: bool = False
    """Learn the length of each row of the adapted weights apart from its direction (DoRA, Liu et al. 2024, arXiv 2402.09353)."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of A's inputs that are 0 in an update, drawn anew for each one; the others are divided by 1 - this."""
    targets: Annotated[tuple[Projection, ...], Field(min_length=1)] = get_args(Plain)
    """Projections that have an adapter, in every layer; `q_a_proj` to `kv_b_proj` are those of latent attention (DeepSeek-V2 and
    V3), `gate_up_proj` and `down_proj` those of experts that lie in one tensor (GPT-OSS)."""
    path: str | None = None
    """PEFT folder whose adapters training goes on from, with the rank, alpha and targets given here; default: new ones. A stage that starts from
    an earlier one's checkpoint, whose weights hold that one's adapters, has new ones."""
    base: Nf4Spec | None = None
    """How the matrices of the frozen model's layers are held; default: in the model's type."""

    @model_validator(mode="after")
    def _dropout_leaves_the_base_alone(self) -> LoraSpec:
        if self.dora and self.dropout:
            raise ValueError(
                f"`dropout` is {self.dropout:g}, but `dora` scales the layer's own product, which dropout would then change too; leave one of them out"
            )
        return self

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class PromptTuningSpec(Spec):
    """Virtual tokens before each row, whose embeddings alone are trained (Lester et al. 2021, arXiv 2104.08691)."""

    noun: ClassVar[str] = "virtual tokens"
    """What it is called in messages."""
    kind: Literal["prompt_tuning"] = "prompt_tuning"
    """What is trained in the model's place."""
    tokens: PositiveInt = 16
    """Virtual tokens; they take as many places of the context."""


class PrefixTuningSpec(Spec):
    """Keys and values before each row, learned for every layer (Li and Liang 2021, arXiv 2101.00190)."""

    noun: ClassVar[str] = "virtual tokens"
    """What it is called in messages."""
    kind: Literal["prefix_tuning"] = "prefix_tuning"
    """What is trained in the model's place."""
    tokens: PositiveInt = 16
    """Keys and values of a layer and head; they take as many places of the context."""


BottleneckActivation = Literal["relu", "gelu", "silu", "tanh"]


class BottleneckSpec(Spec):
    """A narrow feed-forward layer of every layer, which alone is trained: A(x) = scale (W_up f(W_down x + b_down) + b_up)."""

    noun: ClassVar[str] = "bottleneck adapters"
    """What they are called in messages."""
    kind: Literal["bottleneck"] = "bottleneck"
    """What is trained in the model's place."""
    placement: Literal["houlsby", "pfeiffer", "parallel"] = "houlsby"
    """`houlsby`: one behind attention and one behind the feed-forward layer, each with a residual of its own (Houlsby et al. 2019, arXiv
    1902.00751); `pfeiffer`: behind the feed-forward layer alone (Pfeiffer et al. 2021, arXiv 2005.00247); `parallel`: beside it, reading what it
    reads (He et al. 2022, arXiv 2110.04366)."""
    reduction: PositiveInt | None = None
    """The adapter is hidden_size / reduction wide; default: 16, or what `width` says."""
    width: PositiveInt | None = None
    """Its width in channels, in the place of `reduction`."""
    activation: BottleneckActivation = "relu"
    """f, between its two matrices."""
    scale: PositiveFloat = 1.0
    """Factor of what it adds; He et al. used 4 with `parallel`."""

    @model_validator(mode="after")
    def _one_size(self) -> BottleneckSpec:
        if self.width is not None and self.reduction is not None:
            raise ValueError("`reduction` and `width` both give the adapter's size; leave one of them out")
        return self

    def width_in(self, hidden: int) -> int:
        """Its width, in channels, in a model so wide."""
        return hidden // self.reduced_by if self.width is None else self.width

    @property
    def reduced_by(self) -> int:
        """`reduction`, or its default."""
        return 16 if self.reduction is None else self.reduction


VirtualTokensSpec = PromptTuningSpec | PrefixTuningSpec
"""What stands before each row."""
AdapterSpec = Annotated[VirtualTokensSpec | BottleneckSpec, Field(discriminator="kind")]


class PolicySpec(Spec):
    """The trainable model as a service."""

    backend: Literal["megatron", "fsdp"] = "megatron"
    """What trains: Megatron Core, or PyTorch's fully sharded data parallelism over transformers' models of any architecture."""
    layout: LayoutSpec = LayoutSpec()
    """Parallel layout."""
    rows: Literal["shared_prefix", "packed", "padded"] = "shared_prefix"
    """How rows share a forward pass: one prompt for its samples, laid end to end, or padded."""
    micro_batch_tokens: PositiveInt = 16384
    """Token budget of one forward-backward pass on one rank, in tokens; one longer row still makes a pass of its own."""
    fp8: Fp8Spec | None = None
    """Compute linear layers in FP8 (an NVIDIA GPU of the Hopper generation or newer, `model.dtype: bfloat16`); default: off."""
    recompute: RecomputeSpec | None = None
    """Compute activations again in the backward pass instead of keeping them; default: keep them."""
    offload: OffloadSpec = OffloadSpec()
    """Keep optimizer state, or models that are not trained, in host memory; default: nothing."""
    router: RouterSpec = RouterSpec()
    """How a model with experts balances them."""
    lora: LoraSpec | None = None
    """Train adapters instead of the whole model; default: off."""
    adapter: AdapterSpec | None = None
    """Train something else beside the model, which stays as it is; default: off."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose vocabulary-sized logits exist at once, in tokens."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of one rank; 0 = all cores divided by ranks."""

    @model_validator(mode="after")
    def _one_thing_is_trained(self) -> PolicySpec:
        if self.adapter is None:
            return self
        if self.lora is not None:
            raise ValueError("`lora` and `adapter` are both given; leave one of them out")
        if isinstance(self.adapter, VirtualTokensSpec) and self.router.replay != "none":
            raise ValueError(
                "`router.replay` keeps the experts of a row's own tokens, and `adapter` puts virtual ones before them; leave one of them out"
            )
        if isinstance(self.adapter, PrefixTuningSpec) and self.router != RouterSpec():
            raise ValueError(
                "`router` has losses, but routers see virtual tokens that `adapter: prefix_tuning` gives no hidden states; leave one of them out"
            )
        if isinstance(self.adapter, PromptTuningSpec) and self.layout.pp > 1:
            raise ValueError(
                f"`layout.pp` is {self.layout.pp}, but with `adapter: prompt_tuning` only the first stage has something to train; set it to 1"
            )
        return self

    @model_validator(mode="after")
    def _one_narrow_type(self) -> PolicySpec:
        if self.lora is not None and self.lora.base is not None and self.fp8 is not None:
            raise ValueError(
                "`fp8` computes products in FP8, and `lora.base` holds their matrices in NF4 for products in the model's type; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_leave_biases(self) -> PolicySpec:
        beside = "lora" if self.lora is not None else "adapter" if self.adapter is not None else None
        if beside is not None and self.router.bias_update_rate:
            raise ValueError(
                f"`router.bias_update_rate` moves biases of the base model, which `{beside}` leaves as it is; leave one of the two out"
            )
        return self

    @property
    def adapted(self) -> bool:
        """Whether something beside the model is trained in its place."""
        return self.lora is not None or self.adapter is not None

    @property
    def virtual_tokens(self) -> int:
        """Places of the context that are taken before each row."""
        return self.adapter.tokens if isinstance(self.adapter, VirtualTokensSpec) else 0
