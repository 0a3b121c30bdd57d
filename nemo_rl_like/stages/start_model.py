"""Which model a stage starts from: an earlier stage's checkpoint, the spec's folder, or one from scratch."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import hash_json
from nemo_rl_like.artifacts.types import Artifact
from nemo_rl_like.checkpoint.layout import ModelIdentity
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.data.tokenizer import make_tokenizer
from nemo_rl_like.model.hf_config import ModelConfig, stretched
from nemo_rl_like.model.hf_io import SINGLE
from nemo_rl_like.model.merged_reader import link_merged
from nemo_rl_like.model.outline import Outline, outline_of
from nemo_rl_like.model.peft_config import other_base
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.policy.store import copy_side_files, kept_beside
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tensors.shards import INDEX

logger = logging.getLogger(__name__)

BASE = "base"
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class StartModel:
    """A Hugging Face folder to start from."""

    folder: Path
    """config.json, tokenizer, and weights unless `initialize` is given."""
    initialize: int | None
    """Seed of a model from scratch; None: the folder has weights."""
    config: Outline
    trained: bool = False
    """A stage has made it: what the spec says of its start is behind it."""
    beside: Path | None = None
    """Checkpoint that holds what no weights can; None: they are the whole model."""

    @property
    def identity(self) -> ModelIdentity:
        """What a checkpoint of this model is known by: its shape."""
        shape = self.config.to_hf_dict()
        words = f"{self.config.family}, {self.config.layers} layers x {self.config.hidden_size}, vocabulary {self.config.vocab_size}"
        return ModelIdentity(hash_json(json.loads(json.dumps(shape, default=str))), words)


def weights_of(checkpoint: Artifact) -> Path:
    """The Hugging Face folder inside a checkpoint. Raises InputError if its model has something that no weights hold."""
    found = kept_beside(checkpoint.path)
    if found is not None:
        raise InputError(
            f"{checkpoint.path} has {found} (`policy.adapter`), and no weights compute as the model with them does; export it with "
            "`adapter: true` (`nrl export --adapter`)"
        )
    return checkpoint.path / WEIGHTS


def start_model(spec: ExperimentSpec, folder: Path, checkpoint: Artifact | None) -> StartModel:
    """The model that a stage in `folder` starts from: the checkpoint, or else the spec's model.

    Raises InputError, SpecError.
    """
    if checkpoint is not None:
        if kept_beside(checkpoint.path) is not None:
            return replace(_found(checkpoint.path / WEIGHTS), trained=True, beside=checkpoint.path)
        return replace(_found(weights_of(checkpoint)), trained=True)
    model = spec.model
    if model.init is not None:
        return _from_scratch(spec, folder / BASE)
    source = Path(str(model.path))
    if spec.policy.lora is not None and spec.policy.lora.path is not None:
        _tell_base(source, Path(spec.policy.lora.path))
    if model.tokenizer is None and model.rope_scaling is None and model.adapter is None:
        return _found(source)
    return _changed(spec, source, folder / BASE)


def start_policy(session: RaySession, spec: ExperimentSpec, model: StartModel) -> Policy:
    """The trainable model on ranks of its own, with the adapters of `policy.lora` where they are asked for."""
    return Policy.start(
        session,
        adapters_of(spec.policy, model),
        model.folder,
        spec.model.dtype,
        model.initialize,
        adapter_seed=spec.seed,
    )


def adapters_of(policy: PolicySpec, model: StartModel) -> PolicySpec:
    """The policy block for this start: weights of an earlier stage hold the adapters that it went on from, so new ones are put on them."""
    if policy.lora is None or not model.trained:
        return policy
    return policy.model_copy(update={"lora": policy.lora.model_copy(update={"path": None})})


def sampled_policy(session: RaySession, spec: ExperimentSpec, model: StartModel) -> Policy:
    """The model on ranks of its own to sample from, with what it has beside its weights."""
    seed = None if model.beside is None else spec.seed
    policy = Policy.start(session, spec.policy, model.folder, spec.model.dtype, model.initialize, adapter_seed=seed)
    if model.beside is not None:
        policy.load(model.beside)
    return policy


def _tell_base(source: Path, adapter: Path) -> None:
    told = other_base(source, adapter)
    if told is not None:
        logger.warning(told)


def _found(folder: Path) -> StartModel:
    return StartModel(folder, None, outline_of(folder))


def _from_scratch(spec: ExperimentSpec, folder: Path) -> StartModel:
    assert spec.model.init is not None and spec.model.tokenizer is not None  # the spec's own rules
    tokenizer = make_tokenizer(spec.model.tokenizer)
    made = ModelConfig.from_init(spec.model.init, len(tokenizer))
    raw = stretched(made, spec.model.rope_scaling, spec.model.max_positions).to_hf_dict(spec.model.dtype)
    raw |= {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    ends = {name: raw[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(str(folder))
    return StartModel(folder, spec.seed, ModelConfig.from_hf_folder(folder))


def _changed(spec: ExperimentSpec, source: Path, folder: Path) -> StartModel:
    """The source's configuration and weights (linked, not copied) with adapters, another tokenizer or stretched positions."""
    model = spec.model
    folder.mkdir(parents=True, exist_ok=True)
    copy_side_files(source, folder)
    if model.tokenizer is not None:
        make_tokenizer(model.tokenizer).save_pretrained(str(folder))
    if model.rope_scaling is not None:
        config = stretched(ModelConfig.from_hf_folder(source), model.rope_scaling, model.max_positions)
        file = folder / "config.json"
        raw = {**json.loads(file.read_text(encoding="utf-8")), **config.positions_to_hf_dict()}
        file.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    if model.adapter is not None:
        _tell_base(source, Path(model.adapter))
        link_merged(folder, source, Path(model.adapter))
        return _found(folder)
    for file in source.iterdir():
        if file.suffix == ".safetensors" or file.name in (INDEX, SINGLE):
            link = folder / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
    return _found(folder)
