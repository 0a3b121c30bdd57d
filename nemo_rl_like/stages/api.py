"""What one does with a checkpoint after training: evaluate it, talk to it, export it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.artifacts.types import Artifact, Checkpoint
from nemo_rl_like.checkpoint.layout import MANIFEST, STATE, step_folders, verify
from nemo_rl_like.data.messages import Message, user
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.export.bundle import ExportSource, How, write_bundles
from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.rollout.seeds import seed_of
from nemo_rl_like.spec.evaluate import EvaluationSpec
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, stage_name
from nemo_rl_like.spec.export import ExportStageSpec
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.stages.averaging import AVERAGED
from nemo_rl_like.stages.evaluate import evaluate, evaluator
from nemo_rl_like.stages.preflight import require_sampler
from nemo_rl_like.stages.session import shared_session
from nemo_rl_like.stages.start_model import sampled_policy, start_model
from nemo_rl_like.training.engine import EngineClient, RunEngine
from nemo_rl_like.training.trainer import CHECKPOINTS

SPEC = "spec.yaml"


def evaluate_checkpoint(source: Path, how: EvaluationSpec) -> dict[str, float]:
    """Metrics of the checkpoint at `source` (a run's folder: its last one) on its own environment's held-out tasks.

    Raises InputError if there is no checkpoint, or the run has no environment.
    """
    spec, checkpoint = _open(source)
    if spec.environment is None:
        raise InputError(f"{source}: its spec has no `environment`, so there is nothing to evaluate it on")
    with tempfile.TemporaryDirectory(prefix="nrl-eval-") as folder:
        model = start_model(spec, Path(folder), checkpoint)
        with evaluator(spec, Path(folder), model) as (workers, engine):
            return evaluate(workers, engine, how).metrics()


def checkpoint_at(source: Path) -> Path:
    """The valid checkpoint at `source`, or the last one of the run there. Raises InputError, CheckpointError."""
    return _checkpoint(source).path


def export_checkpoint(
    source: Path, target: Path, stage: ExportStageSpec, lineage: Mapping[str, JSON] | None = None
) -> list[Path]:
    """Write the checkpoint at `source` as an `export` stage would: its only target as `target`, several as `target/<kind>`; returns them.

    Raises as `write_bundles`.
    """
    checkpoint = _checkpoint(source)
    run = _run_of(source, checkpoint)
    spec = None if run is None else load_spec(run / SPEC)
    wanted = stage.wanted
    places = [(one, target if len(wanted) == 1 else target / one.kind) for one in wanted]
    how = How(stage.shard_gib, stage.parity, stage.parity_timeout_s, stage.license)
    write_bundles(ExportSource(checkpoint.path, spec, run, lineage or {}), places, how)
    return [place for _, place in places]


@dataclass(slots=True)
class ChatSession:
    """A conversation with a checkpoint; the whole of it is rendered anew for each answer."""

    renderer: Renderer
    engine: EngineClient
    sampling: Sampling
    messages: list[Message]

    def reply(self, text: str) -> str:
        """The model's answer. Raises InputError when the conversation fills the context."""
        asked = [*self.messages, user(text)]
        turn = len(asked)
        prompt = self.renderer.prompt_ids(asked)
        request = Request(f"chat-{turn}", prompt, (seed_of("chat", turn),))
        ((completion,),) = self.engine.generate([request], self.sampling)
        answer = self.renderer.reply(completion.ids)
        self.messages = [*asked, answer]
        return answer.content


@contextmanager
def chat_session(source: Path, *, temperature: float, max_new_tokens: int) -> Iterator[ChatSession]:
    """Start the checkpoint at `source` for a conversation; temperature 0 is greedy."""
    spec, checkpoint = _open(source)
    require_sampler(spec)
    with tempfile.TemporaryDirectory(prefix="nrl-chat-") as folder:
        session = shared_session(spec.cluster, Path(folder))
        model = start_model(spec, Path(folder), checkpoint)
        renderer = Renderer.load(model.folder)
        policy = sampled_policy(session, spec, model)
        try:
            engine = RunEngine.start(spec.engine, policy, model.folder, spec.model.dtype, model.config)
            sampling = Sampling(
                temperature=temperature or 1.0,
                greedy=temperature == 0,
                max_new_tokens=max_new_tokens,
                stop_token_ids=renderer.stop_ids,
            )
            try:
                yield ChatSession(renderer, engine.client(), sampling, [])
            finally:
                engine.close()
        finally:
            policy.group.shutdown()


def _open(source: Path) -> tuple[ExperimentSpec, Artifact]:
    """The resolved spec of the run that `source` belongs to, as the checkpoint's stage sees it, and the checkpoint."""
    checkpoint = _checkpoint(source)
    run = _run_of(source, checkpoint)
    if run is not None:
        spec = load_spec(run / SPEC)
        made_by = checkpoint.path.resolve().relative_to(run.resolve()).parts[0]
        stage = next((s for s in spec.stages if stage_name(s) == made_by), None)
        return (spec if stage is None else spec.for_stage(stage)), checkpoint
    raise InputError(f"{source}: no {SPEC} in it or above it; give a run's output folder or a checkpoint inside one")


def _run_of(source: Path, checkpoint: Artifact) -> Path | None:
    """The output folder of the run that made the checkpoint; None where it stands alone."""
    return next((folder for folder in (source, *checkpoint.path.parents) if (folder / SPEC).is_file()), None)


def _checkpoint(source: Path) -> Artifact:
    """The valid checkpoint at `source`, or the last one of the run there. Raises InputError, CheckpointError."""
    if (source / STATE).is_file() or (source / MANIFEST).is_file():
        verify(source)
        return Checkpoint(source, "")
    if not (source / SPEC).is_file():
        raise InputError(f"{source} is neither a run's output folder (no {SPEC}) nor a checkpoint (no {MANIFEST})")
    spec = load_spec(source / SPEC)
    for stage in reversed(spec.stages):
        if isinstance(stage, TRAINING_STAGES):
            for kind in (AVERAGED, CHECKPOINTS):  # an average is what the stage hands on
                for folder in step_folders(source / stage_name(stage) / kind):
                    verify(folder)
                    return Checkpoint(folder, "")
    raise InputError(f"{source} has no checkpoint yet; let a training stage save one first")
