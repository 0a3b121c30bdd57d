"""Writes bundles: one Hugging Face folder is made and proved, every other bundle is made from it, and nothing has its name before it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.files import sha256_file
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.artifacts.lineage import LINEAGE, lineage_text
from nemo_rl_like.checkpoint.layout import MANIFEST as CHECKPOINT_MANIFEST
from nemo_rl_like.checkpoint.layout import read_manifest as read_checkpoint
from nemo_rl_like.export.card import CARD, card
from nemo_rl_like.export.check import layout_problems
from nemo_rl_like.export.folders import file_problems, link_tree, make_readable, whole
from nemo_rl_like.export.gguf_file import write_gguf
from nemo_rl_like.export.hf import adapter_differences, adapters_of, copy_adapters, copy_model
from nemo_rl_like.export.hf_layout import hf_problems
from nemo_rl_like.export.manifest import (
    Manifest,
    ParityRecord,
    SourceRecord,
    code_version,
    file_records,
    write_manifest,
)
from nemo_rl_like.export.nim import write_nim, write_nim_lora
from nemo_rl_like.export.parity import prove
from nemo_rl_like.export.problems import Problem, read_object, require_none
from nemo_rl_like.export.quantized import check_quantized, write_quantized
from nemo_rl_like.export.targets import target_problems
from nemo_rl_like.export.triton import write_triton_python, write_triton_trtllm, write_triton_vllm
from nemo_rl_like.model.outline import outline_of
from nemo_rl_like.policy.store import kept_beside
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.export import (
    ADAPTER_TARGETS,
    GgufTarget,
    HfLoraTarget,
    HfTarget,
    NimLoraTarget,
    NimTarget,
    QuantizedTarget,
    TargetSpec,
    TritonPythonTarget,
    TritonTrtllmTarget,
    TritonVllmTarget,
)
from nemo_rl_like.spec.loader import spec_hash

WEIGHTS = "weights"
_SCORE = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What is exported."""

    checkpoint: Path
    """A valid checkpoint's folder."""
    spec: ExperimentSpec | None = None
    """Of the run that made it; None where the checkpoint stands alone."""
    run_folder: Path | None = None
    lineage: Mapping[str, JSON] = field(default_factory=dict)
    """Where the checkpoint comes from, for `lineage.json`; empty where that is not known."""


@dataclass(frozen=True, slots=True)
class How:
    """How it is exported."""

    shard_gib: float = 4.0
    parity: Literal["auto", "full", "weights"] = "auto"
    parity_timeout_s: float = 3600.0
    license: str | None = None


def write_bundles(source: ExportSource, places: Sequence[tuple[TargetSpec, Path]], how: How) -> None:
    """Write each target to its place, which must be new or an empty folder.

    Raises:
        InputError: the checkpoint has no such thing (adapters, a language model), an adapter's folder or the family cannot be used.
        OutputFolderError: a place is taken.
        BundleError: the export differs from the checkpoint, or a bundle fails its own validator.
    """
    outline = outline_of(source.checkpoint / WEIGHTS)
    for target, _ in places:
        problems = target_problems(target, outline)
        if problems:
            raise InputError(problems[0])
        _check_target(source, target)
    with ExitStack() as stack:
        models = [place for target, place in places if not isinstance(target, ADAPTER_TARGETS)]
        if models:
            hf = stack.enter_context(_scratch(models[0]))
            copy_model(source.checkpoint / WEIGHTS, hf, how.shard_gib)
            require_none(_model_problems(source, hf), hf)
            parity = prove(source.checkpoint / WEIGHTS, hf, how.parity, how.parity_timeout_s)
        else:
            hf, parity = Path(), ParityRecord(level="weights", reason="adapters alone have no logits")
        for target, place in places:
            with whole(place) as partial:
                _write(source, hf, partial, target)
                _finish(source, partial, target, parity, how)


def _model_problems(source: ExportSource, hf: Path) -> list[Problem]:
    return [] if _scores(source) else hf_problems(hf)


def _check_target(source: ExportSource, target: TargetSpec) -> None:
    """Raise InputError for what can be told before anything is written."""
    beside = kept_beside(source.checkpoint)
    if isinstance(target, ADAPTER_TARGETS):
        own = adapters_of(source.checkpoint)
        if isinstance(target, NimLoraTarget) and beside is not None:
            raise InputError(f"{own} holds {beside}, and NIM serves LoRA alone; export hf-lora instead")
        return
    if beside is not None:
        raise InputError(
            f"{source.checkpoint} has {beside} (`policy.adapter`), and no weights compute as the model with them does; export it with "
            "`adapter: true` (`nrl export --adapter`)"
        )
    if _scores(source) and not isinstance(target, HfTarget):
        raise InputError(
            f"{source.checkpoint} is a reward model, and {target.kind} serves what writes text; export it as hf"
        )
    if isinstance(target, QuantizedTarget):
        check_quantized(source.checkpoint / WEIGHTS, target)


def _write(source: ExportSource, hf: Path, folder: Path, target: TargetSpec) -> None:
    match target:
        case HfTarget():
            link_tree(hf, folder)
        case HfLoraTarget():
            _copy_adapters(source, folder)
        case TritonPythonTarget():
            write_triton_python(hf, folder, target)
        case TritonVllmTarget():
            write_triton_vllm(hf, folder, target)
        case TritonTrtllmTarget():
            write_triton_trtllm(hf, folder, target)
        case NimTarget():
            write_nim(hf, folder, target)
        case NimLoraTarget():
            with _scratch(folder) as own:
                _copy_adapters(source, own)
                write_nim_lora(own, folder, target)
        case QuantizedTarget():
            write_quantized(hf, folder, target)
        case GgufTarget():
            write_gguf(hf, folder, target)


def _copy_adapters(source: ExportSource, folder: Path) -> None:
    copy_adapters(source.checkpoint, folder)
    require_none(adapter_differences(source.checkpoint, folder), folder)


def _finish(source: ExportSource, folder: Path, target: TargetSpec, parity: ParityRecord, how: How) -> None:
    """Card and manifest, and the bundle's own validator."""
    manifest = Manifest(
        kind=target.kind,
        options=target.model_dump(mode="json", exclude={"kind"}),
        code=code_version(),
        spec_sha256=None if source.spec is None else spec_hash(source.spec),
        source=_record(source),
        parity=parity,
        files=(),
    )
    text = card(manifest, source.spec, source.run_folder, source.checkpoint / WEIGHTS, how.license)
    (folder / CARD).write_text(text, encoding="utf-8")
    if source.lineage:
        (folder / LINEAGE).write_text(lineage_text(source.lineage), encoding="utf-8")
    write_manifest(folder, manifest.model_copy(update={"files": file_records(folder)}))
    make_readable(folder)
    mounted_at = manifest.options.get("mounted_at")
    problems = file_problems(folder)
    if not (isinstance(target, HfTarget) and _scores(source)):
        problems += layout_problems(folder, target.kind, mounted_at if isinstance(mounted_at, str) else None)
    require_none(problems, folder)


def _record(source: ExportSource) -> SourceRecord:
    checkpoint, run = source.checkpoint, source.run_folder
    inside = run is not None and checkpoint.resolve().is_relative_to(run.resolve())
    name = checkpoint.resolve().relative_to(run.resolve()).as_posix() if run is not None and inside else checkpoint.name
    found = read_checkpoint(checkpoint)
    return SourceRecord(
        checkpoint=name,
        step=found.step,
        manifest_sha256=sha256_file(checkpoint / CHECKPOINT_MANIFEST),
        model=found.model.description,
    )


def _scores(source: ExportSource) -> bool:
    """Whether the checkpoint is a reward model, which has neither a language model's head nor stop tokens."""
    config = read_object(source.checkpoint / WEIGHTS / "config.json", "")[0]
    return any(str(name).endswith(_SCORE) for name in config.get("architectures") or ())


@contextmanager
def _scratch(beside: Path) -> Iterator[Path]:
    """A folder beside a bundle, on its file system, that is gone afterwards."""
    folder = beside.with_name(f".tmp-from-{beside.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
