"""What the stages with teachers share: their checks, where their log-probs come from, and the models on the policy's ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.artifacts.hashing import fingerprint_path
from nemo_rl_like.artifacts.types import Artifact
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.datasets import load_messages
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.stored_logits import LogitsOrigin
from nemo_rl_like.data.tokenizer import tokenizer_sha256
from nemo_rl_like.model.outline import Outline, outline_of
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.policy.top import TopK
from nemo_rl_like.spec.distill import TeachersSpec
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.preflight import check_stage_beside, check_teacher
from nemo_rl_like.stages.shapes import config_of
from nemo_rl_like.stages.start_model import weights_of
from nemo_rl_like.stages.workers import context_tokens

LOGITS = "logits"
"""Folder that a `teacher_logits` stage writes, below its own."""


def teacher_checks(spec: ExperimentSpec, block: TeachersSpec) -> list[Callable[[], object]]:
    """What can be found wrong with the teachers before anything starts."""
    each = [partial(_check_teacher, spec, block, number) for number in range(len(block.teachers))]
    return [lambda: tokens_asked(block, config_of(spec)), *each]


def teacher_folders(block: TeachersSpec, inputs: Mapping[str, Artifact]) -> tuple[Path, ...]:
    """Hugging Face folders of the teachers, by number; those of earlier stages are among `inputs`."""
    return tuple(weights_of(inputs[t.stage]) if t.stage is not None else Path(str(t.path)) for t in block.teachers)


def _check_teacher(spec: ExperimentSpec, block: TeachersSpec, number: int) -> None:
    """A teacher fits the policy, and has as many tokens as it is asked for. Raises InputError, SpecError."""
    teacher = block.teachers[number]
    if teacher.stage is not None:
        return check_stage_beside(spec, f"teachers.{number}.stage", teacher.stage)
    field, path = f"teachers.{number}.path", str(teacher.path)
    check_teacher(spec, path, field)
    asked, has = tokens_asked(block, config_of(spec)), outline_of(Path(path)).vocab_size
    if has < asked:
        raise SpecError(
            f"`top_k` is {block.top_k}, which asks for {asked} tokens at each place, and `{field}` {path} has {has}; lower `top_k`"
        )


def tokens_asked(block: TeachersSpec, config: Outline) -> int:
    """Tokens at each place that a teacher is asked for. Raises SpecError."""
    try:
        return block.k_of(config.vocab_size)
    except ValueError as error:
        raise SpecError(str(error)) from error


def asked_of(block: TeachersSpec, config: Outline) -> TopK:
    """What the teachers are asked, for a student of this shape."""
    return TopK(tokens_asked(block, config), block.temperature, below=config.vocab_size)


def origin_of(
    spec: ExperimentSpec,
    block: TeachersSpec,
    folders: Sequence[Path],
    path: str,
    renderer: Renderer,
    config: Outline,
) -> LogitsOrigin:
    """What the log-probs of the file at `path`, by the teachers in `folders`, depend on. Raises InputError, SpecError."""
    return LogitsOrigin(
        data=load_messages(path).sha256,
        tokenizer=tokenizer_sha256(renderer.tokenizer),
        teachers=tuple(
            f"{t.domain or 'all'}:{fingerprint_path(folder)}" for t, folder in zip(block.teachers, folders, strict=True)
        ),
        top_k=tokens_asked(block, config),
        temperature=block.temperature,
        max_tokens=context_tokens(spec, config),
    )


def host_teachers(group: WorkerGroup, spec: ExperimentSpec, folders: Sequence[Path]) -> tuple[Policy, ...]:
    """The teachers in `folders` on the policy's ranks, by number."""
    hosted = []
    for number, folder in enumerate(folders):
        model = Policy(group, f"teacher-{number}")
        model.host(folder, spec.policy, spec.model.dtype, on_host=spec.policy.offload.frozen)
        hosted.append(model)
    return tuple(hosted)
