"""The model card of a bundle: what it is made from, how, on what, how it measured, and under which licence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from nemo_rl_like.export.manifest import Manifest
from nemo_rl_like.spec.experiment import ExperimentSpec, StageSpec, stage_name
from nemo_rl_like.spec.export import ExportStageSpec

CARD = "README.md"
_REPORT = "report/report.json"
"""Where an `evaluate` stage leaves its figures, in its folder."""
_DATA_FIELDS = ("path", "paths", "environment_demonstrations", "from_stage")


def card(
    manifest: Manifest, spec: ExperimentSpec | None, run: Path | None, weights: Path, license_name: str | None
) -> str:
    """The text; `weights` is the checkpoint's folder, whose own card may name the licence."""
    licence = license_name or _stated_licence(weights)
    front = {"license": licence or "unknown", "library_name": "transformers", "pipeline_tag": "text-generation"}
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=True)}---\n",
        f"# {spec.name if spec is not None else 'Model'}\n",
        f"A `{manifest.kind}` bundle of {manifest.source.model}, from checkpoint `{manifest.source.checkpoint}` (step {manifest.source.step}).\n",
        _section("Base model", [_base(spec)]),
        _section("Method", list(_method(spec))),
        _section("Data", list(_data(spec))),
        _section("Metrics", list(_metrics(run, manifest))),
        _section("Proved before publishing", [_parity(manifest)]),
        _section(
            "Licence", [licence or "Not stated: the base model's folder names none; set `license` in the export stage."]
        ),
        "`manifest.json` has the hash of every file, the spec's and the checkpoint's.\n",
    ]
    return "\n".join(parts)


def _section(title: str, lines: list[str]) -> str:
    return f"## {title}\n\n" + "\n".join(lines or ["Not known: the checkpoint was exported without its run."]) + "\n"


def _base(spec: ExperimentSpec | None) -> str:
    if spec is None:
        return "Not known: the checkpoint was exported without its run."
    if spec.model.path is None:
        return "None: trained from scratch."
    merged = f", with the adapters of `{spec.model.adapter}` merged into it" if spec.model.adapter is not None else ""
    return f"`{spec.model.path}`{merged}"


def _method(spec: ExperimentSpec | None) -> Iterator[str]:
    for stage in _makers(spec):
        values = stage.model_dump(mode="json")
        steps = f", {values['steps']} steps" if values.get("steps") else ""
        preset = values.get("preset") or (values.get("algorithm") or {}).get("preset")
        yield f"- `{stage_name(stage)}`: {stage.kind}" + (f" ({preset})" if preset else "") + steps


def _data(spec: ExperimentSpec | None) -> Iterator[str]:
    for stage in _makers(spec):
        data = stage.model_dump(mode="json").get("data") or {}
        named = {name: data[name] for name in _DATA_FIELDS if data.get(name)}
        if named:
            yield f"- `{stage_name(stage)}`: " + ", ".join(
                f"{name} {json.dumps(value)}" for name, value in named.items()
            )
    if spec is not None and spec.environment is not None:
        environment = spec.environment.model_dump(mode="json")
        yield f"- environment: `{environment.get('name') or environment.get('prompts')}`"


def _metrics(run: Path | None, manifest: Manifest) -> Iterator[str]:
    """The figures of the exported stage's checkpoint in each report of the run."""
    stage = manifest.source.checkpoint.split("/")[0]
    reports = sorted(run.glob(f"*/{_REPORT}")) if run is not None else []
    for report in reports:
        results = json.loads(report.read_bytes())["results"]
        for name, value in results.get(stage, {}).get("metrics", {}).items():
            yield f"- {name} ({report.parts[-3]}): {value:.4f}"
    if not reports:
        yield "No `evaluate` stage of the run has measured it."


def _parity(manifest: Manifest) -> str:
    found = manifest.parity
    if found.level == "weights":
        return f"Every tensor has the checkpoint's bytes. No more was proved: {found.reason}."
    return (
        f"Every tensor has the checkpoint's bytes. Plain transformers against {found.reference}, both in float32: logits of {found.tokens} places "
        f"differ by {found.max_logit_difference:.2g} at most ({found.tolerance:.2g} allowed), {found.greedy_tokens} greedy tokens, the chat "
        "template and the stop tokens agree."
    )


def _makers(spec: ExperimentSpec | None) -> tuple[StageSpec, ...]:
    """Stages that made the model."""
    if spec is None:
        return ()
    return tuple(stage for stage in spec.stages if not isinstance(stage, ExportStageSpec) and stage.kind != "evaluate")


def _stated_licence(weights: Path) -> str | None:
    """`license` in the front matter of the base model's card, which its checkpoints carry."""
    file = weights / CARD
    if not file.is_file():
        return None
    parts = file.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        front = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return None
    found = front.get("license") if isinstance(front, Mapping) else None
    return found if isinstance(found, str) and found != "unknown" else None
