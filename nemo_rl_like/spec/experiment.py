"""The experiment spec: one typed vocabulary for every backend. Units stand in each field's help."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_like.spec.algorithm import CRITIC, GROUP_RELATIVE, AlgorithmSpec, PassAtKAdvantage
from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.distill import DistillStageSpec, TeacherLogitsStageSpec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.pretrain import PretrainStageSpec, PtxSpec
from nemo_rl_like.spec.reward_model import RewardModelSpec, RewardModelStageSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.spec.stage import CheckpointSpec, EmaSpec, OptimizerSpec, SamplingSpec, StageBase

DType = Literal["float32", "bfloat16"]


class ModelInitSpec(Spec):
    """A model made from scratch."""

    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    """Architecture family."""
    hidden_size: PositiveInt = 192
    """Width of the residual stream, in channels."""
    intermediate_size: PositiveInt = 512
    """Width of the feed-forward layer, in channels."""
    layers: PositiveInt = 5
    """Number of decoder layers."""
    heads: PositiveInt = 6
    """Number of query heads."""
    kv_heads: PositiveInt = 6
    """Number of key/value heads; must divide `heads`."""
    head_dim: PositiveInt = 32
    """Width of one head, in channels."""
    max_positions: PositiveInt = 256
    """Longest context, in tokens."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    tie_embeddings: bool = True
    """Share the input embedding and the output head."""


class TokenizerSpec(Spec):
    """Where the tokenizer comes from, when it is not the model folder's own."""

    path: str | None = None
    """Folder with a Hugging Face tokenizer."""
    characters: str | None = None
    """Make a character tokenizer over this alphabet (with pad, begin and end tokens and a plain chat template)."""

    @model_validator(mode="after")
    def _one_source(self) -> TokenizerSpec:
        if (self.path is None) == (self.characters is None):
            raise ValueError("give exactly one of `path` and `characters`")
        return self


class ModelSpec(Spec):
    """The policy's model: a Hugging Face folder or one made from scratch."""

    path: str | None = None
    """Hugging Face folder (config.json, safetensors, tokenizer)."""
    init: ModelInitSpec | None = None
    """Make the model from scratch instead of reading `path`."""
    tokenizer: TokenizerSpec | None = None
    """Tokenizer; default: the one in `path`."""
    dtype: DType = "float32"
    """Parameter and activation type."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of `path` and `init`")
        if self.init is not None and self.tokenizer is None:
            raise ValueError("a model from scratch (`init`) needs `tokenizer`")
        return self


class LayoutSpec(Spec):
    """How the model is split over ranks; world size = dp * pp * tp."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel stages."""
    dp: PositiveInt = 1
    """Data-parallel ranks."""


class Fp8Spec(Spec):
    """Linear layers computed in FP8 by Transformer Engine; weights, attention and the head stay in the model's type."""

    recipe: Literal["tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """How values are scaled: one factor a tensor, one a block of 128, or one a block of 32 (Blackwell GPUs)."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """`hybrid`: E4M3 forward and E5M2 gradients; `e4m3` for both."""
    first_bf16_layers: NonNegativeInt = 0
    """Layers at the start that stay in bfloat16."""
    last_bf16_layers: NonNegativeInt = 0
    """Layers at the end that stay in bfloat16."""


class PolicySpec(Spec):
    """The trainable model as a service."""

    layout: LayoutSpec = LayoutSpec()
    """Parallel layout."""
    rows: Literal["shared_prefix", "packed", "padded"] = "shared_prefix"
    """How rows share a forward pass: one prompt for its samples, laid end to end, or padded."""
    micro_batch_tokens: PositiveInt = 16384
    """Token budget of one forward-backward pass on one rank, in tokens; one longer row still makes a pass of its own."""
    fp8: Fp8Spec | None = None
    """Compute linear layers in FP8 (an NVIDIA GPU of the Hopper generation or newer, `model.dtype: bfloat16`); default: off."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose vocabulary-sized logits exist at once, in tokens."""
    threads_per_rank: NonNegativeInt = 0
    """CPU threads of one rank; 0 = all cores divided by ranks."""


class ClusterSpec(Spec):
    """Where workers run."""

    address: str | None = None
    """Ray address to join; default: start a local Ray."""
    devices: PositiveInt | None = None
    """Devices that ranks may use; default: visible GPUs, or CPU cores on a machine without one."""
    auth: Literal["disabled", "token"] = "disabled"
    """Ray's authentication mode, always set explicitly; `token` for a cluster of several hosts."""
    object_store_gib: PositiveFloat = 1.0
    """Size of the local Ray object store, in GiB."""
    start_timeout_s: PositiveFloat = 180.0
    """Longest wait for Ray and for workers to start, in seconds."""
    step_timeout_s: PositiveFloat = 3600.0
    """Longest wait for one part of a step, in seconds."""


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
        exact = model_dtype == "float32" and self.dtype in (None, "float32")
        return self.max_gap_p99 or (1e-3 if exact else 0.3)


class EnvironmentSpec(Spec):
    """What asks and judges: a registered environment, or a reward function over a file of prompts."""

    name: str | None = None
    """Registered name, or `pkg.mod:Class`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own settings."""
    reward: str | None = None
    """`file.py:function` or `pkg.mod:function` with `reward_func(prompts, responses, labels=None) -> list[float]`."""
    reward_url: str | None = None
    """HTTP address of a scorer: POST {"prompts", "responses", "labels"} -> {"rewards"}."""
    prompts: str | None = None
    """JSONL file for `reward`/`reward_url`, or alone where a reward model judges: one {"messages": [{"role", "content"}], "label"?} or a list of messages a line."""
    label_key: str = "label"
    """Key of the label in a prompts row."""
    max_turns: PositiveInt = 8
    """Model turns in one episode."""
    step_timeout_s: PositiveFloat = 30.0
    """Longest time of one environment call, in seconds; then its process is killed and the sample is invalid."""
    processes: NonNegativeInt = 1
    """Killable processes that run environments; 0 = inside the rollout worker (no protection from hangs)."""
    max_invalid_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Stop the run when more than this fraction of a step's samples is invalid."""

    @model_validator(mode="after")
    def _one_source(self) -> EnvironmentSpec:
        given = [k for k in ("name", "reward", "reward_url") if getattr(self, k) is not None]
        if len(given) > 1 or (not given and self.prompts is None):
            raise ValueError(
                f"give exactly one of `name`, `reward` and `reward_url`; got {given or 'none'} (with `prompts` alone, `rl` needs a "
                "`reward_model`)"
            )
        if self.name is None and self.prompts is None:
            raise ValueError("`reward` and `reward_url` need `prompts`, a JSONL file")
        return self

    @property
    def scores(self) -> bool:
        """Whether it has a reward of its own."""
        return any(source is not None for source in (self.name, self.reward, self.reward_url))


class SftDataSpec(Spec):
    """Supervised data: a file of messages, demonstrations of the environment's tasks, or what a `sample` stage kept."""

    path: str | None = None
    """JSONL file: one {"messages": [...]} a line; assistant messages are trained, each times its own "weight" if it has one."""
    environment_demonstrations: bool = False
    """Use the environment's own right answers on its train split."""
    from_stage: str | None = None
    """Stage whose dataset is trained; default: the last `sample` stage before this one, if no other source is given."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the data held out for the validation loss (the environment has a validation split of its own)."""

    @property
    def is_made(self) -> bool:
        """Whether an earlier stage makes the data."""
        return self.path is None and not self.environment_demonstrations

    @model_validator(mode="after")
    def _one_source(self) -> SftDataSpec:
        given = [self.path is not None, self.environment_demonstrations, self.from_stage is not None]
        if sum(given) > 1:
            raise ValueError("give at most one of `path`, `environment_demonstrations: true` and `from_stage`")
        return self


class SftStageSpec(StageBase):
    """Supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    """Stage kind."""
    data: SftDataSpec = SftDataSpec()
    """Training data; default: what the last `sample` stage before this one kept."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    examples_per_step: PositiveInt = 64
    """Examples in one optimizer step."""
    loss: Literal["cross_entropy", "dft"] = "cross_entropy"
    """`dft` weighs each token's cross-entropy by its probability (dynamic fine-tuning); validation is cross-entropy either way."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean squared log-normaliser, which keeps logits from drifting (1e-4 is usual); 0 = off."""
    optimizer: OptimizerSpec = OptimizerSpec(lr=1e-5)
    """Optimizer and schedule."""
    ema: EmaSpec | None = None
    """Average the weights over the steps; default: off."""
    ptx: PtxSpec | None = None
    """Mix the loss of pretraining text into each optimizer step; default: off."""
    validate_every_steps: NonNegativeInt = 0
    """Validation loss every this many steps; 0 = never."""
    validation_examples: PositiveInt = 256
    """Examples of one validation."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints of this stage."""
    init_from: str | None = None
    """Stage whose checkpoint this one starts from; default: the stage before it that makes one, or the model."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> SftStageSpec:
        self.optimizer.check_updates(self.steps)
        return self


class CriticSpec(Spec):
    """The critic of `gae` and `vapo`: the stage's own start model with a value head of zeros, or a model of its own."""

    path: str | None = None
    """Hugging Face folder to start from, for example a reward model; default: the model that the policy starts from."""
    optimizer: OptimizerSpec = OptimizerSpec(lr=1e-5)
    """Optimizer and schedule."""
    value_clip: PositiveFloat | None = 0.2
    """How far a value may move from its old one within a step; null: anywhere."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start in which only the critic is trained."""


OwnRanks = Literal["reference", "teacher", "critic", "reward_model"]
"""Models beside the policy that may have ranks of their own."""


class RlStageSpec(StageBase):
    """Reinforcement learning from an environment."""

    kind: Literal["rl"] = "rl"
    """Stage kind."""
    steps: PositiveInt = 100
    """Rollout batches."""
    prompts_per_step: PositiveInt = 8
    """Prompts in one rollout batch."""
    samples_per_prompt: PositiveInt = 8
    """Samples of each prompt: the group size."""
    updates_per_batch: PositiveInt = 1
    """Minibatches of whole groups, one optimizer step each."""
    epochs: PositiveInt = 1
    """Passes over the rollout batch."""
    sampling: SamplingSpec = SamplingSpec()
    """Sampling of training rollouts."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """Loss and advantages."""
    loop: str | None = None
    """`file.py:function` or `pkg.mod:function` in the place of the step's dataflow; see docs/one_step.md. Default: the standard one."""
    critic: CriticSpec | None = None
    """The critic of an advantage that reads values; made with its defaults where one is needed."""
    teacher: str | None = None
    """Hugging Face folder of the model whose log-probs `algorithm.distill_coef` adds; the same tokenizer as the policy's."""
    reward_model: RewardModelSpec | None = None
    """A judge of finished episodes, beside the environment's own reward or in its place."""
    own_ranks: tuple[OwnRanks, ...] = ()
    """Models on ranks of their own, laid out as the policy's (each reward model of an ensemble has some); the others share the policy's
    ranks, in turn with it."""
    ptx: PtxSpec | None = None
    """Mix the loss of pretraining text into each optimizer step; default: off."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer and schedule."""
    evaluate_every_steps: NonNegativeInt = 0
    """Evaluate on the validation split every this many steps; 0 = never."""
    evaluation: EvaluationSpec | None = None
    """How to evaluate during training."""
    show_samples: NonNegativeInt = 3
    """Sampled responses shown in the terminal now and then."""
    show_samples_every_steps: PositiveInt = 10
    """How often they are shown, in steps."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints of this stage."""
    init_from: str | None = None
    """Stage whose checkpoint this one starts from; default: the stage before it that makes one, or the model."""

    @model_validator(mode="after")
    def _combinations(self) -> RlStageSpec:
        self._check_groups()
        if self.algorithm.opponent is None and any(one.kind == "win_rate" for one in self.algorithm.shaping):
            raise ValueError(
                "`shaping` win_rate compares with an opponent; give `opponent: reference` or `opponent: mixture`"
            )
        if (self.algorithm.distill_coef > 0) != (self.teacher is not None):
            raise ValueError("`algorithm.distill_coef` above 0 and `teacher` go together: give both, or neither")
        self._check_own_ranks()
        if self.updates_per_batch > self.prompts_per_step:
            raise ValueError(
                f"`updates_per_batch` is {self.updates_per_batch}, more than the {self.prompts_per_step} groups of `prompts_per_step`"
            )
        if self.evaluate_every_steps and self.evaluation is None:
            raise ValueError("`evaluate_every_steps` needs an `evaluation` block")
        updates = self.updates_per_batch * self.epochs
        self.optimizer.check_updates((self.steps - self.warmup_steps) * updates)
        if self.needs_critic:
            self.critic_or_default.optimizer.check_updates(self.steps * updates)
        return self

    @property
    def models_beside(self) -> dict[OwnRanks, int]:
        """How many models of each role the stage has beside the policy."""
        judges = 0 if self.reward_model is None else len(self.reward_model.paths) + len(self.reward_model.stages)
        return {
            "reference": int(self.algorithm.needs_reference or self.algorithm.opponent is not None),
            "teacher": int(self.teacher is not None),
            "critic": int(self.needs_critic),
            "reward_model": judges,
        }

    def _check_own_ranks(self) -> None:
        """Raise ValueError for ranks of a model that the stage does not have, or that must be beside the policy."""
        for name in self.own_ranks:
            if not self.models_beside[name]:
                raise ValueError(f"`own_ranks` has {name}, but the stage has none; leave it out")
        if "reference" in self.own_ranks and self.algorithm.opponent is not None:
            raise ValueError(
                "`own_ranks` has reference, but an `opponent` is decoded on policy and reference together; leave it out"
            )

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage reads a critic's values."""
        return self.algorithm.advantage.kind in CRITIC

    @property
    def critic_or_default(self) -> CriticSpec:
        """The critic's block, or its defaults."""
        return self.critic or CriticSpec()

    @property
    def warmup_steps(self) -> int:
        """Steps at the start in which the policy stays as it is."""
        return self.critic_or_default.warmup_steps if self.needs_critic else 0

    def _check_groups(self) -> None:
        """Raise ValueError unless a prompt has as many samples as the algorithm compares."""
        advantage, samples = self.algorithm.advantage, self.samples_per_prompt
        pairs, alone = self.algorithm.pairs, samples < 2
        if pairs is not None and self.algorithm.opponent is None and alone:
            raise ValueError(
                f"`samples_per_prompt` is {samples}, but `pairs` compares samples of one prompt and needs at least 2 (or an `opponent`)"
            )
        if pairs is None and advantage.kind in GROUP_RELATIVE and alone:
            raise ValueError(
                f"`samples_per_prompt` is {samples}, but advantage `{advantage.kind}` compares samples of one prompt and needs at "
                "least 2 (8 is usual; `reinforce` works with 1)"
            )
        if isinstance(advantage, PassAtKAdvantage) and advantage.k > samples:
            raise ValueError(f"`advantage.k` is {advantage.k}, more than the {samples} of `samples_per_prompt`")
        if self.critic is not None and not self.needs_critic:
            raise ValueError(
                f"`critic` is given, but advantage `{advantage.kind}` reads no values; remove it, or use {' or '.join(CRITIC)}"
            )
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"`critic.warmup_steps` is {self.warmup_steps}, must be below the stage's {self.steps} `steps`"
            )
        kept = self.algorithm.replay_filter
        if kept is not None and kept.keep > samples:
            raise ValueError(f"`replay_filter.keep` is {kept.keep}, more than the {samples} of `samples_per_prompt`")


class EvaluationSpec(Spec):
    """One evaluation on held-out tasks."""

    split: Literal["validation", "test"] = "test"
    """Which held-out split."""
    tasks: PositiveInt | None = None
    """Number of tasks, from the front of the split; default: all."""
    samples_per_task: NonNegativeInt = 0
    """Samples a task at `temperature` (avg@k); 0 = greedy only."""
    temperature: PositiveFloat = 1.0
    """Temperature of the samples."""
    max_new_tokens: PositiveInt = 256
    """Longest response, in tokens."""


class EvaluateStageSpec(StageBase):
    """Evaluate the checkpoints of earlier stages on held-out tasks."""

    kind: Literal["evaluate"] = "evaluate"
    """Stage kind."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """What to evaluate."""
    checkpoints: tuple[str, ...] = ()
    """Stages whose final checkpoint is evaluated; default: every stage before this one that makes one."""
    show_samples: NonNegativeInt = 5
    """Before/after samples shown at the end."""


class ExportStageSpec(StageBase):
    """Write the final model as a Hugging Face folder."""

    kind: Literal["export"] = "export"
    """Stage kind."""
    checkpoint: str | None = None
    """Stage whose final checkpoint is exported; default: the last one that makes one."""
    shard_gib: PositiveFloat = 4.0
    """Largest safetensors shard, in GiB."""


RlStageSpec.model_rebuild()
StageSpec = Annotated[
    PretrainStageSpec
    | SftStageSpec
    | RlStageSpec
    | PreferenceStageSpec
    | RewardModelStageSpec
    | DistillStageSpec
    | TeacherLogitsStageSpec
    | SampleStageSpec
    | EvaluateStageSpec
    | ExportStageSpec,
    Field(discriminator="kind"),
]
TRAINING_STAGES = (PretrainStageSpec, SftStageSpec, RlStageSpec, PreferenceStageSpec, DistillStageSpec)
"""Stages that train a policy: each makes a checkpoint that writes text."""


class LoggingSpec(Spec):
    """Where metrics go; JSONL is always written."""

    tensorboard: bool = True
    """Also write TensorBoard events."""
    rollouts: bool = True
    """Write every episode (prompt, sampled ids, rewards) to rollouts.jsonl."""


class SecretRef(Spec):
    """A secret by reference: the name of an environment variable, never its value."""

    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the environment variable."""


class ExperimentSpec(Spec):
    """One experiment: what to train, on what, and where the result goes."""

    name: str = "experiment"
    """Name of the experiment."""
    seed: NonNegativeInt = 1
    """Seed of everything random: initial weights, data order, sampling."""
    output: str
    """Output folder, made if missing."""
    model: ModelSpec
    """The policy's model."""
    policy: PolicySpec = PolicySpec()
    """The trainable model as a service."""
    cluster: ClusterSpec = ClusterSpec()
    """Where workers run."""
    engine: EngineSpec = EngineSpec()
    """What samples from the policy."""
    environment: EnvironmentSpec | None = None
    """What asks and judges; needed by `rl`, `sample`, `evaluate` and demonstrations."""
    stages: Annotated[tuple[StageSpec, ...], Field(min_length=1)]
    """The pipeline: stages in order."""
    logging: LoggingSpec = LoggingSpec()
    """Metric sinks."""
    secrets: dict[str, SecretRef] = Field(default_factory=dict)
    """Secrets by the environment variable that holds them."""

    @model_validator(mode="after")
    def _fp8_has_its_type(self) -> ExperimentSpec:
        if self.policy.fp8 is not None and self.model.dtype != "bfloat16":
            raise ValueError(
                f"`policy.fp8` needs `model.dtype: bfloat16`, which is {self.model.dtype}; change one of them"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> ExperimentSpec:
        names = [stage_name(s) for s in self.stages]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"`stages` has the name {twice[0]!r} more than once; give each a `name` of its own")
        for stage in self.stages:
            asks = isinstance(stage, RlStageSpec | SampleStageSpec | EvaluateStageSpec) or (
                isinstance(stage, SftStageSpec) and stage.data.environment_demonstrations
            )
            if asks and self.environment is None:
                raise ValueError(f"stage {stage_name(stage)!r} needs an `environment` block")
            if asks and self.environment is not None and not self.environment.scores:
                self._check_judge(stage)
        return self

    @staticmethod
    def _check_judge(stage: StageSpec) -> None:
        """Raise ValueError unless a stage on prompts alone has a judge."""
        name, judge = stage_name(stage), stage.reward_model if isinstance(stage, RlStageSpec) else None
        if judge is None or (isinstance(stage, RlStageSpec) and stage.evaluate_every_steps):
            what = (
                "evaluates" if judge is not None or not isinstance(stage, RlStageSpec) else "needs a `reward_model`, or"
            )
            raise ValueError(
                f"stage {name!r} {what} an environment with a reward of its own, and `environment` has `prompts` alone; give it "
                "`reward`, `reward_url` or `name`"
            )


def stage_name(stage: StageSpec) -> str:
    """The stage's name: the one given, or its kind."""
    return stage.name or stage.kind
