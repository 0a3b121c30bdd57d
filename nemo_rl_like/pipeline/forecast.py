"""What a run needs and takes, by arithmetic on the spec alone: ranks, memory, tokens, time. Nothing is loaded, started or measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.activations import HeadShape
from nemo_rl_like.model.hf_config import ModelConfig, stretched
from nemo_rl_like.model.memory import ITEMSIZE, Memory, Training
from nemo_rl_like.model.parameter_buffers import parameter_buffers
from nemo_rl_like.model.pass_sizes import MicroBatchShape
from nemo_rl_like.spec.distill import DistillStageSpec, TeacherLogitsStageSpec
from nemo_rl_like.spec.evaluate import EvaluateStageSpec
from nemo_rl_like.spec.experiment import ExperimentSpec, StageSpec, stage_name
from nemo_rl_like.spec.policy import LayoutSpec
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.pretrain import PretrainStageSpec
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.spec.sft import SftStageSpec

SPECIAL_TOKENS = 4
"""Tokens of a character tokenizer beside its characters: pad, begin, end, unknown."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device as its maker's data sheet describes it."""

    flops: float
    """Dense 16-bit operations in a second."""
    bandwidth: float
    """Bytes of its memory read in a second."""
    memory: int
    """Bytes."""


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": Hardware(312e12, 2.0e12, 80 * GIB),
        "h100": Hardware(989e12, 3.35e12, 80 * GIB),
        "h200": Hardware(989e12, 4.8e12, 141 * GIB),
        "b200": Hardware(2250e12, 8.0e12, 180 * GIB),
    }
)
"""By name; SXM modules, NVIDIA's data sheets."""


@dataclass(frozen=True, slots=True)
class Role:
    """A model or an engine of a stage, and the ranks it has."""

    name: str
    ranks: int
    """Devices of its own; 0: it shares those of the role before it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step of a stage computes, at most: rows are taken to fill the context."""

    steps: int
    trained_tokens: int
    """Tokens of a step that go forward and backward, over all updates."""
    scored_tokens: int
    """Tokens that only go forward, through models of the policy's size."""
    sampled_tokens: int
    """Tokens that the engine makes."""
    rows: int
    """Rows that are sampled at once, or trained in a step."""


@dataclass(frozen=True, slots=True)
class StageForecast:
    """What one stage needs and takes."""

    name: str
    kind: str
    parameters: int
    active_parameters: int
    """Those that a token passes: fewer, with experts."""
    roles: tuple[Role, ...]
    work: Work | None
    """None: the stage computes nothing with a model."""
    memory: Memory | None
    """Of the policy's rank that needs most; None where it is not estimated."""
    why_no_memory: str
    beside: Mapping[str, int]
    """Bytes of a rank for what stands beside the trained model."""
    problem: str = ""
    """Why nothing is known of the stage: its model cannot be read here."""

    @property
    def devices(self) -> int:
        """Devices that the stage needs."""
        return sum(role.ranks for role in self.roles)

    @property
    def memory_of_rank(self) -> int | None:
        """Bytes of the rank that needs most, with all that stands on it."""
        return None if self.memory is None else self.memory.total + sum(self.beside.values())

    def seconds(self, hardware: Hardware, efficiency: float) -> float:
        """Time of all steps, if operations run at `efficiency` of the peak and decoding reads all weights for each token of a row."""
        if self.work is None:
            return 0.0
        work, policy = self.work, max(1, self.roles[0].ranks)
        operations = self.active_parameters * (6 * work.trained_tokens + 2 * work.scored_tokens)
        step = operations / (policy * hardware.flops * efficiency)
        if work.sampled_tokens:
            samplers = max(1, next((r.ranks for r in self.roles if r.name == "engine"), 0) or policy)
            compute = 2 * self.active_parameters * work.sampled_tokens / (samplers * hardware.flops * efficiency)
            reads = work.sampled_tokens / work.rows * 2 * self.parameters / hardware.bandwidth
            step += max(compute, reads)
        return step * work.steps


def forecast(spec: ExperimentSpec) -> tuple[StageForecast, ...]:
    """Every stage of the pipeline, in order."""
    return tuple(_stage(spec.for_stage(stage), stage) for stage in spec.stages)


def shape_from_spec(spec: ExperimentSpec) -> ModelConfig:
    """The shape of the spec's model, read from JSON files alone. Raises InputError."""
    model = spec.model
    if model.init is not None:
        found = ModelConfig.from_init(model.init, _vocabulary(spec))
    else:
        found = ModelConfig.from_hf_folder(Path(str(model.path)))
    return stretched(found, model.rope_scaling, model.max_positions)


def _vocabulary(spec: ExperimentSpec) -> int:
    """Tokens of the spec's tokenizer. Raises InputError."""
    tokenizer = spec.model.tokenizer
    assert tokenizer is not None  # the spec's own rule for models from scratch
    if tokenizer.characters is not None:
        return SPECIAL_TOKENS + len(tokenizer.characters)
    file = Path(str(tokenizer.path)) / "tokenizer.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return len(raw["model"]["vocab"].keys() | {token["content"] for token in raw.get("added_tokens", [])})
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"`model.tokenizer.path`: {file} cannot be read ({error}); give a folder with a tokenizer.json"
        ) from error


def _stage(spec: ExperimentSpec, stage: StageSpec) -> StageForecast:
    try:
        config = shape_from_spec(spec)
    except InputError as error:
        return StageForecast(stage_name(stage), stage.kind, 0, 0, (), None, None, "", {}, str(error))
    work = _work(spec, stage, config)
    total, active = _parameters(config)
    memory, why = (
        _memory(spec, config, work) if work is not None and work.trained_tokens else (None, "nothing is trained")
    )
    return StageForecast(
        stage_name(stage),
        stage.kind,
        total,
        active,
        _roles(spec, stage, work),
        work,
        memory,
        why,
        _beside(spec, stage, total),
    )


def _parameters(config: ModelConfig) -> tuple[int, int]:
    """All parameters (with the padding of Megatron's buffers), and those that one token passes."""
    dense, experts = parameter_buffers(config, LayoutSpec(), 0)
    share = 1.0 if config.experts is None else config.experts.per_token / config.experts.count
    return dense + experts, dense + int(experts * share)


def _context(spec: ExperimentSpec, config: ModelConfig) -> int:
    places = config.max_positions - spec.policy.virtual_tokens
    return min(spec.engine.max_context or places, places)


def _work(spec: ExperimentSpec, stage: StageSpec, config: ModelConfig) -> Work | None:
    row = _context(spec, config)
    if isinstance(stage, RlStageSpec):
        rows = stage.prompts_per_step * stage.samples_per_prompt
        beside = sum(stage.models_beside.values()) - int(stage.needs_critic)
        proximal = int(stage.updates_per_batch * stage.epochs > 1)
        trained = rows * row * stage.epochs * (1 + int(stage.needs_critic))
        return Work(stage.steps, trained, rows * row * (beside + proximal), rows * stage.sampling.max_new_tokens, rows)
    if isinstance(stage, PretrainStageSpec):
        tokens = stage.rows_per_step * (stage.sequence_tokens or row)
        return Work(stage.steps, tokens, 0, 0, stage.rows_per_step)
    if isinstance(stage, PreferenceStageSpec):
        rows = stage.pairs_per_step * (1 if stage.unpaired else 2)
        return Work(stage.steps, rows * row, rows * row, 0, rows)
    if isinstance(stage, RewardModelStageSpec):
        rows = stage.examples_per_step * (2 if stage.loss.kind == "pairwise" else 1)
        return Work(stage.steps, rows * row, 0, 0, rows)
    if isinstance(stage, DistillStageSpec):
        rows, sampled = stage.examples_per_step, stage.sampled_per_step
        asked = 0 if stage.data.is_stored else rows * row
        return Work(stage.steps, rows * row, asked, sampled * stage.sampling.max_new_tokens, rows)
    if isinstance(stage, SftStageSpec):
        return Work(stage.steps, stage.examples_per_step * row, 0, 0, stage.examples_per_step)
    if isinstance(stage, SampleStageSpec):
        rows = stage.prompts_per_batch * stage.samples_per_prompt
        batches = math.ceil((stage.tasks or stage.prompts_per_batch) / stage.prompts_per_batch)
        return Work(batches, 0, 0, rows * stage.sampling.max_new_tokens, rows)
    return None


def _memory(spec: ExperimentSpec, config: ModelConfig, work: Work | None) -> tuple[Memory | None, str]:
    """Of the policy's rank that needs most, or why it is not estimated."""
    policy = spec.policy
    if policy.backend != "megatron":
        return None, "`policy.backend: fsdp` is not estimated"
    if policy.adapted:
        return None, "adapters are not estimated"
    assert work is not None
    share = math.ceil(work.trained_tokens / policy.layout.dp)
    row = _context(spec, config)
    tokens = max(min(policy.micro_batch_tokens, share), min(row, share))
    training = Training(
        config,
        spec.model.dtype,
        MicroBatchShape.packed(tokens, min(row, tokens)),
        max(1, math.ceil(share / tokens)),
        HeadShape(policy.logprob_chunk_tokens),
        "transformer_engine" if spec.launch.accelerator == "gpu" else "local",
        policy.recompute,
        policy.offload.optimizer,
    )
    try:
        return training.peak(policy.layout), ""
    except InputError as error:
        return None, str(error)


def _roles(spec: ExperimentSpec, stage: StageSpec, work: Work | None) -> tuple[Role, ...]:
    """The policy first; then what has ranks of its own, and what shares the policy's."""
    ranks = spec.policy.layout.ranks
    if work is None and not isinstance(stage, EvaluateStageSpec | TeacherLogitsStageSpec):
        return ()
    roles = [Role("policy", ranks)]
    if isinstance(stage, RlStageSpec):
        for name, count in stage.models_beside.items():
            roles += [Role(name, ranks if name in stage.own_ranks else 0)] * count
    samples = isinstance(stage, EvaluateStageSpec) or (work is not None and work.sampled_tokens > 0)
    if samples:
        engine = spec.engine
        roles.append(Role("engine", engine.replicas * engine.tensor_parallel if engine.kind == "vllm" else 0))
    return tuple(roles)


def _beside(spec: ExperimentSpec, stage: StageSpec, parameters: int) -> dict[str, int]:
    """Bytes of a policy's rank for further models of the policy's own shape."""
    if not isinstance(stage, RlStageSpec) or spec.policy.adapted or spec.policy.offload.frozen:
        return {}
    layout = spec.policy.layout
    if not stage.models_beside["reference"] or "reference" in stage.own_ranks:
        return {}
    return {"reference": parameters * ITEMSIZE[spec.model.dtype] // (layout.tp * layout.pp)}
