"""Stage keys: what a stage's result depends on. Two stages with one key have one result."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import nemo_rl_like
from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.artifacts.hashing import JSON, canonical_json, fingerprint_path, hash_json, hash_path
from nemo_rl_like.spec.distill import DistillStageSpec, TeacherLogitsStageSpec
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.evaluate import EvaluateStageSpec
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, StageSpec
from nemo_rl_like.spec.export import ExportStageSpec, NimLoraTarget, QuantizedTarget, TritonVllmTarget
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.pretrain import PretrainStageSpec, TextDataSpec
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.spec.sft import SftStageSpec

KEY_FORMAT = 1
"""Raised when the meaning of a key changes."""

MODEL_FIELDS = ("model.", "file.model.")
"""How the names of what describes the model begin."""

_NOT_RESULTS_STAGE = {"name", "settings", "checkpoint", "show_samples", "show_samples_every_steps", "parity_timeout_s"}
_ENGINE_RESULTS = {"kind", "max_context", "dtype", "quantization"}


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What goes into a key: by dotted name, so that a change can be told by name."""

    values: Mapping[str, str]
    """Canonical JSON of each value, by dotted name."""

    @property
    def key(self) -> str:
        """SHA-256 (hex) over all of them."""
        return hash_json(dict(self.values))

    def changes_from(self, old: Mapping[str, str]) -> list[str]:
        """What differs from the ingredients of an earlier run, in words."""
        names = sorted(set(self.values) | set(old))
        return [f"{n}: {old.get(n)} -> {self.values.get(n)}" for n in names if old.get(n) != self.values.get(n)]


def ingredients(stage: StageSpec, spec: ExperimentSpec, inputs: Mapping[str, tuple[str, str]]) -> Ingredients:
    """Everything that the result of `stage` depends on.

    How a result is computed (layout, batching, threads, checkpoint rhythm, displays) is left out, so a half-done stage may be
    resumed on other hardware; what is computed (data, model, losses, seed, package version) is in.

    Args:
        stage: the stage.
        spec: the experiment it stands in.
        inputs: (key, content hash) of the artifact of each stage that it builds on, by that stage's name.

    Raises:
        InputError: a file or folder that the spec names does not exist.
    """
    export = {"checkpoint"} if stage.kind == "export" else set()
    values = _flat("format", KEY_FORMAT) | _flat("version", nemo_rl_like.__version__) | _flat("seed", spec.seed)
    if spec.code == "source":
        values |= _flat("code", source_hash())
    values |= _flat("stage", stage.model_dump(mode="json", exclude=_NOT_RESULTS_STAGE - export))
    values |= model_ingredients(spec)
    if isinstance(stage, TRAINING_STAGES) and spec.policy.lora is not None:
        values |= _flat("policy.lora", spec.policy.lora.model_dump(mode="json"))
        if spec.policy.lora.path is not None:
            content = fingerprint_path(_existing("policy.lora.path", spec.policy.lora.path))
            values |= _flat("file.policy.lora.path", content)
    if isinstance(stage, TRAINING_STAGES) and spec.policy.adapter is not None:
        values |= _flat("policy.adapter", spec.policy.adapter.model_dump(mode="json"))
    if uses_environment(stage) and spec.environment is not None:
        values |= _flat("environment", spec.environment.model_dump(mode="json", exclude={"processes"}))
    samples = isinstance(stage, DistillStageSpec) and stage.sampled_per_step > 0
    if samples or isinstance(stage, RlStageSpec | SampleStageSpec | EvaluateStageSpec):
        values |= _flat("engine", spec.engine.model_dump(mode="json", include=_ENGINE_RESULTS))
    values |= _flat("file", _stage_files(stage, spec))
    values |= _flat("input", {name: {"key": key, "content": content} for name, (key, content) in inputs.items()})
    return Ingredients(values)


@functools.cache
def source_hash() -> str:
    """SHA-256 (hex) over names and contents of this package's source files and presets, and of the ready-made environments'."""
    package = Path(nemo_rl_like.__file__).parent
    folders = [package, *(f for f in [package.parent / "environments"] if (f / "__init__.py").is_file())]
    files = [f for folder in folders for f in sorted(folder.rglob("*")) if f.suffix in (".py", ".yaml")]
    return hash_json([[f.relative_to(package.parent).as_posix(), sha256_file(f)] for f in files])


def uses_environment(stage: StageSpec) -> bool:
    """Whether the stage asks the environment for tasks."""
    if isinstance(stage, SftStageSpec):
        return stage.data.environment_demonstrations
    return isinstance(stage, RlStageSpec | SampleStageSpec | EvaluateStageSpec)


def model_ingredients(spec: ExperimentSpec) -> dict[str, str]:
    """What describes the model, its files by content. Raises InputError when one does not exist."""
    hashes: dict[str, JSON] = {}
    if spec.model.path is not None:
        hashes["model.path"] = fingerprint_path(_existing("model.path", spec.model.path))
    if spec.model.adapter is not None:
        hashes["model.adapter"] = fingerprint_path(_existing("model.adapter", spec.model.adapter))
    if spec.model.tokenizer is not None and spec.model.tokenizer.path is not None:
        hashes["model.tokenizer.path"] = hash_path(_existing("model.tokenizer.path", spec.model.tokenizer.path))
    return _flat("model", spec.model.model_dump(mode="json")) | _flat("file", hashes)


def _stage_files(stage: StageSpec, spec: ExperimentSpec) -> dict[str, str]:
    """Content hashes of the files that the stage reads beside the model, by dotted path."""
    hashes: dict[str, str] = {}
    reads = SftStageSpec | PreferenceStageSpec | RewardModelStageSpec | DistillStageSpec | TeacherLogitsStageSpec
    if isinstance(stage, reads) and stage.data.path is not None:
        hashes["data.path"] = hash_path(_existing("data.path", stage.data.path))
    if isinstance(stage, RlStageSpec):
        hashes |= _rl_files(stage)
    if isinstance(stage, DistillStageSpec | TeacherLogitsStageSpec):
        for number, teacher in enumerate(stage.teachers):
            field = f"teachers.{number}.path"
            if teacher.path is None:
                continue
            hashes[field] = fingerprint_path(_existing(field, teacher.path))
    if isinstance(stage, DistillStageSpec) and stage.data.stored_logits is not None:
        hashes["data.stored_logits"] = hash_path(_existing("data.stored_logits", stage.data.stored_logits))
    if isinstance(stage, PretrainStageSpec):
        hashes |= _text_files("data", stage.data)
    if isinstance(stage, ExportStageSpec):
        hashes |= _target_files(stage)
    if isinstance(stage, SftStageSpec | RlStageSpec) and stage.ptx is not None:
        hashes |= _text_files("ptx", stage.ptx)
    if uses_environment(stage) and spec.environment is not None:
        hashes |= _environment_files(spec.environment)
    return hashes


def _rl_files(stage: RlStageSpec) -> dict[str, str]:
    """Other models that the stage reads, and the file of its loop."""
    critic, judge = stage.critic, stage.reward_model
    folders = {"teacher": stage.teacher, "critic.path": None if critic is None else critic.path}
    folders |= {f"reward_model.paths[{i}]": path for i, path in enumerate(() if judge is None else judge.paths)}
    found = {field: fingerprint_path(_existing(field, path)) for field, path in folders.items() if path is not None}
    code = (stage.loop or "").rpartition(":")[0]
    if code.endswith(".py"):
        found["loop"] = hash_path(_existing("loop", code))
    return found


def _target_files(stage: ExportStageSpec) -> dict[str, str]:
    """Adapters from elsewhere that its targets serve, and text that they calibrate on."""
    targets = [target for target in stage.targets if isinstance(target, TritonVllmTarget | NimLoraTarget)]
    named = {f"targets.{t.kind}.adapters.{name}": path for t in targets for name, path in t.adapters.items()}
    named |= {f"targets.{t.kind}.calibration": t.calibration for t in stage.targets if isinstance(t, QuantizedTarget)}
    return {field: hash_path(_existing(field, path)) for field, path in named.items()}


def _text_files(field: str, text: TextDataSpec) -> dict[str, str]:
    return {f"{field}.paths.{i}": hash_path(_existing(f"{field}.paths", p)) for i, p in enumerate(text.paths)}


def _environment_files(environment: EnvironmentSpec) -> dict[str, str]:
    hashes: dict[str, str] = {}
    if environment.prompts is not None:
        hashes["environment.prompts"] = hash_path(_existing("environment.prompts", environment.prompts))
    code = (environment.reward or "").rpartition(":")[0]
    if code.endswith(".py"):
        hashes["environment.reward"] = hash_path(_existing("environment.reward", code))
    return hashes


def _existing(field: str, name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise InputError(f"`{field}` is {name!r}, which does not exist (looked in {Path.cwd()}); give an existing path")
    return path


def _flat(prefix: str, value: JSON) -> dict[str, str]:
    """Nested mappings as one level with dotted names; other values as canonical JSON."""
    if not isinstance(value, Mapping):
        return {prefix: canonical_json(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flat(f"{prefix}.{key}", item)
    return flat
