"""`manifest.json` of a bundle: what it is, what it was made from, what was proved, and the hash of every other file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

import nemo_rl_like
from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.export.problems import Problem

MANIFEST = "manifest.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """One file of a bundle."""

    path: str
    """Relative POSIX path."""
    size: int
    """Bytes."""
    sha256: str
    """SHA-256 (hex) of its bytes."""


class SourceRecord(_Record):
    """The checkpoint that a bundle was made from."""

    checkpoint: str
    """Its folder, relative to the run's where there is one."""
    step: int
    """Step after which it was saved."""
    manifest_sha256: str
    """SHA-256 (hex) of its own manifest, and so of all its files."""
    model: str
    """The model in a few words."""


class ParityRecord(_Record):
    """What was proved before the bundle got its name."""

    level: Literal["full", "weights"]
    """`weights`: every tensor has the checkpoint's bytes; `full`: also what plain transformers computes and renders."""
    reason: str = ""
    """Why no more than `weights` was proved; empty when full."""
    reference: Literal["megatron", "transformers", ""] = ""
    """What computed the trainer's side of the full proof."""
    tokens: int = 0
    """Places whose logits were compared."""
    max_logit_difference: float | None = None
    """Largest |trainer's float32 - plain transformers' float32| logit."""
    tolerance: float | None = None
    """Largest difference that passes, for float32 computation whatever the stored type."""
    greedy_tokens: int = 0
    """Greedy tokens compared."""
    greedy_ties: int = 0
    """Prompts that were compared up to a place whose two best logits differ by less than twice the tolerance."""


class Manifest(_Record):
    """The whole file."""

    format: Literal[1] = 1
    kind: str
    """Target kind, as in the spec."""
    options: dict[str, object]
    """The target's options."""
    code: str
    """Version of this package that wrote it."""
    spec_sha256: str | None
    """Hash of the experiment's spec; None where a checkpoint stands alone."""
    source: SourceRecord
    parity: ParityRecord
    files: tuple[FileRecord, ...]
    """Every other file, sorted by path."""


def code_version() -> str:
    """Version of this package."""
    return nemo_rl_like.__version__


def file_records(folder: Path) -> tuple[FileRecord, ...]:
    """Every file below `folder` but the manifest."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return tuple(
        FileRecord(path=name, size=(folder / name).stat().st_size, sha256=sha256_file(folder / name))
        for name in names
        if name != MANIFEST
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into `folder`."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> tuple[Manifest | None, list[Problem]]:
    """The bundle's manifest; None without a problem if it has none."""
    file = folder / MANIFEST
    if not file.is_file():
        return None, []
    try:
        return Manifest.model_validate_json(file.read_bytes()), []
    except (ValidationError, OSError) as error:
        return None, [Problem(MANIFEST, f"is no manifest of this version: {_first(error)}; export again")]


def hash_problems(folder: Path, manifest: Manifest) -> list[Problem]:
    """Files that are missing, changed or not in the manifest."""
    said = {record.path: record for record in manifest.files}
    found = {record.path: record for record in file_records(folder)}
    problems = [Problem(name, "is in the manifest but missing; copy the bundle again") for name in said.keys() - found]
    problems += [Problem(name, "is not in the manifest; remove it, or export again") for name in found.keys() - said]
    for name in said.keys() & found.keys():
        if said[name].size != found[name].size:
            problems.append(
                Problem(name, f"has {found[name].size} bytes, the manifest says {said[name].size}; copy it again")
            )
        elif said[name].sha256 != found[name].sha256:
            problems.append(Problem(name, "has other bytes than the manifest's SHA-256 says; copy it again"))
    return sorted(problems, key=lambda problem: problem.path)


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        one = error.errors(include_url=False)[0]
        return f"`{'.'.join(map(str, one['loc']))}`: {one['msg']}"
    return str(error)
