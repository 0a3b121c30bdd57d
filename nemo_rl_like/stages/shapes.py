"""The tokenizer and the shape of the model that a spec names, read without its weights."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError, SpecError
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import make_tokenizer
from nemo_rl_like.model.foreign_folders import require_model_folder
from nemo_rl_like.model.hf_config import ModelConfig, stretched
from nemo_rl_like.model.outline import Outline, outline_of
from nemo_rl_like.spec.experiment import ExperimentSpec


def renderer_of(spec: ExperimentSpec) -> Renderer:
    """The tokenizer that the spec names, with its chat template. Raises InputError."""
    if spec.model.tokenizer is not None:
        return Renderer(make_tokenizer(spec.model.tokenizer), "model.tokenizer")
    return Renderer.load(_model_folder(spec))


def config_of(spec: ExperimentSpec) -> Outline:
    """The outline of the model that the spec names. Raises InputError, SpecError."""
    if spec.model.init is None and spec.policy.backend == "fsdp":
        return _stretched(spec, outline_in(spec, _model_folder(spec)))
    return shape_of(spec)


def shape_of(spec: ExperimentSpec) -> ModelConfig:
    """The shape of the model that the spec names, as Megatron builds it. Raises InputError."""
    if spec.model.init is None:
        found = ModelConfig.from_hf_folder(_model_folder(spec))
    else:
        found = ModelConfig.from_init(spec.model.init, len(renderer_of(spec).tokenizer))
    return stretched(found, spec.model.rope_scaling, spec.model.max_positions)


def outline_in(spec: ExperimentSpec, folder: Path) -> Outline:
    """What the backend reads of a folder's config.json."""
    return outline_of(folder) if spec.policy.backend == "fsdp" else ModelConfig.from_hf_folder(folder)


def _stretched(spec: ExperimentSpec, config: Outline) -> Outline:
    """The model with the spec's positions. Raises SpecError for a family whose config.json this package does not write."""
    if isinstance(config, ModelConfig):
        return stretched(config, spec.model.rope_scaling, spec.model.max_positions)
    if spec.model.rope_scaling is not None:
        raise SpecError(
            f"`model.rope_scaling` is given, and {config.family} is none of the families whose config.json this package writes; leave it out, "
            "and stretch positions in the model's own config.json"
        )
    return config


def _model_folder(spec: ExperimentSpec) -> Path:
    folder = Path(str(spec.model.path))
    if not folder.is_dir():
        raise InputError(
            f"`model.path` is {spec.model.path!r}, which is not a folder (looked in {Path.cwd()}); give a Hugging Face "
            "folder, or fetch a small one with `nrl model fetch smollm2-135m`"
        )
    require_model_folder(folder, "model.path", spec.model.adapter)
    return folder
