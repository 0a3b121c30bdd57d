"""The experiment spec: one typed vocabulary for every backend. Units stand in each field's help."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, ValidationError, field_validator, model_validator

from nemo_rl_like.spec import fp8
from nemo_rl_like.spec.backend import policy_problem, stage_problem
from nemo_rl_like.spec.base import Spec, form
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.distill import DistillStageSpec, TeacherLogitsStageSpec
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.evaluate import EvaluateStageSpec
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.spec.kubernetes import SecretKeySpec
from nemo_rl_like.spec.launch import LaunchSpec
from nemo_rl_like.spec.model import ModelSpec
from nemo_rl_like.spec.offload import offload_problem
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.pretrain import PretrainStageSpec
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.spec.settings import StageSettings
from nemo_rl_like.spec.sft import SftStageSpec

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

    env: Annotated[str, form(r"^[A-Za-z_][A-Za-z0-9_]*$", "letters, digits and `_`, not a digit first")]
    """Name of the environment variable."""
    kubernetes: SecretKeySpec | None = None
    """Key of the Kubernetes Secret that sets the variable in the job's pods; needed by `nrl submit --to kubernetes`."""


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
    code: Literal["version", "source"] = "version"
    """What of the code a finished stage depends on: the package's version, or every source file of it, so that an edit runs the stage again."""
    logging: LoggingSpec = LoggingSpec()
    """Metric sinks."""
    secrets: dict[str, SecretRef] = Field(default_factory=dict)
    """Secrets by the environment variable that holds them."""
    launch: LaunchSpec = LaunchSpec()
    """The job that `nrl submit` makes of it; changes no result."""

    @field_validator("output")
    @classmethod
    def _names_a_folder(cls, output: str) -> str:
        if not output or re.search(r"[\x00-\x1f\x7f]", output):
            raise ValueError(
                f"{output!r} names no folder: it is empty or has control characters; write a path, for example runs/first"
            )
        return output

    def for_stage(self, stage: StageSpec) -> ExperimentSpec:
        """The experiment as `stage` sees it: with the blocks of its `settings`; other stages keep the experiment's."""
        if stage.settings is None:
            return self
        mine = {name: getattr(self, name) for name in StageSettings.model_fields}
        own = {name: block for name, block in stage.settings if block is not None}
        stages = tuple(
            s if s.settings is not None else s.model_copy(update={"settings": StageSettings(**mine)})
            for s in self.stages
        )
        return self.model_copy(update={**own, "stages": stages})

    def before(self, stage: StageSpec) -> tuple[StageSpec, ...]:
        """The stages before `stage`, in order."""
        return self.stages[: [stage_name(s) for s in self.stages].index(stage_name(stage))]

    def starts_alike(self, one: StageSpec, other: StageSpec) -> bool:
        """Whether two stages have one model, so that either may start from the other's checkpoint; its dtype may differ."""
        shapes = [self.for_stage(stage).model.model_dump(exclude={"dtype"}) for stage in (one, other)]
        return shapes[0] == shapes[1]

    @property
    def _plain_stages(self) -> tuple[StageSpec, ...]:
        """Stages that the experiment's own blocks are for."""
        return tuple(stage for stage in self.stages if stage.settings is None)

    @model_validator(mode="after")
    def _settings_fit(self) -> ExperimentSpec:
        for stage in self.stages:
            if stage.settings is None:
                continue
            name, seen = stage_name(stage), self.for_stage(stage)
            if seen.policy.adapter != self.policy.adapter:
                raise ValueError(
                    f"stage {name!r} has a `settings.policy.adapter` of its own, and virtual tokens go through a whole pipeline; set `policy.adapter`"
                )
            alone = {**dict(seen), "stages": (stage.model_copy(update={"settings": None}),)}
            try:
                ExperimentSpec.model_validate(alone)
            except ValidationError as error:
                texts = [e["msg"].removeprefix("Value error, ") for e in error.errors(include_url=False)]
                raise ValueError(f"stage {name!r} with its `settings`: " + "; ".join(texts)) from error
        return self

    @model_validator(mode="after")
    def _fp8_fits(self) -> ExperimentSpec:
        problem = fp8.fp8_problem(self.policy, self.model.dtype)
        if problem is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _engine_can_quantise(self) -> ExperimentSpec:
        engine = self.engine
        if engine.quantization is None:
            return self
        if engine.kind != "vllm":
            raise ValueError(
                f"`engine.quantization` is {engine.quantization}, which vLLM has, and `engine.kind` is {engine.kind}, which decodes on the "
                "policy's own weights; leave it out, or set `engine.kind: vllm`"
            )
        if (engine.dtype or self.model.dtype) == "float32":
            raise ValueError(
                f"`engine.quantization` is {engine.quantization}, whose activations are 16-bit, and vLLM's type is float32; set "
                "`engine.dtype: bfloat16`, or leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit_memory(self) -> ExperimentSpec:
        for stage in self._plain_stages:
            problem = offload_problem(self.policy.offload, stage) or fp8.stage_problem(self.policy, stage)
            if problem is not None:
                raise ValueError(f"stage {stage_name(stage)!r} {problem}")
        return self

    @model_validator(mode="after")
    def _backend_has_it(self) -> ExperimentSpec:
        if self.policy.backend == "megatron":
            return self
        problem = policy_problem(self.policy)
        if problem is not None:
            raise ValueError(problem)
        if self.model.init is not None and self.model.init.experts is not None:
            raise ValueError(
                f"`model.init.family` is {self.model.init.family}, whose experts transformers joins in memory, and `policy.backend: fsdp` takes "
                "tensors as files name them; use a dense family, or `policy.backend: megatron`"
            )
        for stage in self._plain_stages:
            problem = stage_problem(stage, self.engine)
            if problem is not None:
                raise ValueError(f"stage {stage_name(stage)!r} {problem}")
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> ExperimentSpec:
        if not self.policy.adapted:
            self._check_no_adapter_is_asked_for()
            return self
        name = "policy.adapter" if self.policy.lora is None else "policy.lora"
        for stage in self._plain_stages:
            problem = _needs_whole_weights(stage)
            if problem is not None:
                raise ValueError(f"`{name}` trains adapters alone, but stage {stage_name(stage)!r} {problem}")
        if self.policy.adapter is not None:
            self._check_no_weights_are_needed(self.policy.adapter.noun)
        if self.model.adapter is not None:
            self._check_adapters_have_a_base(name)
            if self.policy.lora is not None and self.policy.lora.path == self.model.adapter:
                raise ValueError(
                    f"`model.adapter` and `policy.lora.path` are both {self.model.adapter!r}, whose adapters would count twice; leave `model.adapter` out to go "
                    "on training them, or `policy.lora.path` to train new ones over them"
                )
        return self

    def _check_adapters_have_a_base(self, name: str) -> None:
        """Adapters are exported over a base that a folder holds."""
        for stage in self._plain_stages:
            trained = [s for s in self.before(stage) if isinstance(s, TRAINING_STAGES)]
            if not isinstance(stage, ExportStageSpec) or not stage.adapters_wanted or not trained:
                continue
            made_by = next((s for s in trained if stage_name(s) == stage.checkpoint), trained[-1])
            if made_by is trained[0]:
                raise ValueError(
                    f"stage {stage_name(stage)!r} exports the adapters of {stage_name(made_by)!r} (`{name}`), whose base is `model.path` with `model.adapter` "
                    "merged, which no folder holds; write one (`nrl model merge`) and give it as `model.path`, or export the whole model"
                )

    def _check_no_weights_are_needed(self, noun: str) -> None:
        """What follows the training of something that no weights hold must sample with it, or export it."""
        if self.engine.kind == "vllm":
            raise ValueError(
                f"`engine.kind` is vllm, which has no {noun}, and `policy.adapter` trains some; use `embedded`"
            )
        trained = False
        for stage in self._plain_stages:
            exports = isinstance(stage, ExportStageSpec) and not stage.model_wanted
            if trained and not (exports or isinstance(stage, EvaluateStageSpec | SampleStageSpec)):
                raise ValueError(
                    f"stage {stage_name(stage)!r} follows the training of {noun} (`policy.adapter`), which no weights hold; only "
                    "`evaluate`, `sample`, and `export` with `adapter: true` may"
                )
            trained = trained or isinstance(stage, TRAINING_STAGES)

    def _check_no_adapter_is_asked_for(self) -> None:
        for stage in self._plain_stages:
            if isinstance(stage, ExportStageSpec) and stage.adapters_wanted:
                asked = "`adapter: true`" if stage.adapter else "a target of adapters"
                raise ValueError(
                    f"stage {stage_name(stage)!r} has {asked}, but nothing trains adapters; leave it out, or set `policy.lora` or `policy.adapter`"
                )

    @model_validator(mode="after")
    def _stages_fit(self) -> ExperimentSpec:
        names = [stage_name(s) for s in self.stages]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"`stages` has the name {twice[0]!r} more than once; give each a `name` of its own")
        for stage in self._plain_stages:
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


def _needs_whole_weights(stage: StageSpec) -> str | None:
    """What of a stage works on whole weights, with the fix; None if nothing does."""
    if isinstance(stage, RewardModelStageSpec):
        return "trains a new head; put the reward model in a spec of its own without adapters"
    if isinstance(stage, SftStageSpec | PretrainStageSpec) and stage.ema is not None:
        return "averages whole weights (`ema`); leave one of them out"
    if isinstance(stage, PreferenceStageSpec) and stage.reference_sync is not None:
        return "moves a whole reference (`reference_sync`); leave one of them out"
    if isinstance(stage, RlStageSpec) and stage.algorithm.opponent is not None:
        return "has an `opponent` with weights of its own; leave one of them out"
    if isinstance(stage, RlStageSpec) and "reference" in stage.own_ranks:
        return "has the reference on ranks of its own, where it is the policy without its adapters; take it out of `own_ranks`"
    return None


def stage_name(stage: StageSpec) -> str:
    """The stage's name: the one given, or its kind."""
    return stage.name or stage.kind
