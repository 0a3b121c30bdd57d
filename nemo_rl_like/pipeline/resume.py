"""Continues a run from its output folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.pipeline.records import SPEC, read_run
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec


@dataclass(frozen=True, slots=True)
class Resumable:
    """What is needed to continue a run."""

    spec: ExperimentSpec
    """The run's own spec, with `output` set to where the folder lies now (absolute)."""
    working_folder: Path
    """Folder that relative paths in the spec start from."""


def load_resumable(folder: Path, overrides: Sequence[str] = ()) -> Resumable:
    """The spec and working folder of the run in `folder`.

    Args:
        folder: output folder of a run.
        overrides: `a.b.c=value` on top of the run's resolved spec.

    Raises:
        OutputFolderError: the folder holds no started run.
        SpecProblems: an override is wrong.
    """
    record = read_run(folder) if folder.is_dir() else None
    if record is None or not (folder / SPEC).is_file():
        raise OutputFolderError(
            f"{folder} holds no started run (no {SPEC} and run.json); give the output folder of a run, "
            "or start again with `nrl run SPEC --resume`"
        )
    spec = load_spec(folder / SPEC, overrides)
    return Resumable(spec.model_copy(update={"output": str(folder.resolve())}), Path(record.working_folder))
