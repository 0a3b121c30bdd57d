"""What a whole run came to: `report.json` at its top, a reward plot, and before/after samples. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_like.artifacts.files import atomic_write
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.observe.metrics import read_series
from nemo_rl_like.observe.plot import plot_curves
from nemo_rl_like.observe.terminal import BeforeAfter
from nemo_rl_like.spec.evaluate import EvaluateStageSpec
from nemo_rl_like.spec.experiment import ExperimentSpec, stage_name
from nemo_rl_like.spec.loader import spec_hash
from nemo_rl_like.spec.rl import RlStageSpec

METRICS = "metrics.jsonl"
PLOT = "reward.png"
REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What is shown at the end of a run."""

    report: Mapping[str, JSON]
    """Content of `report.json`."""
    plot: Path | None
    """Reward curve, if there was reinforcement learning."""
    samples: tuple[BeforeAfter, ...]
    """The same held-out prompts before and after, if two checkpoints were evaluated."""
    before: str = ""
    after: str = ""

    def accuracies(self) -> dict[str, float]:
        """Held-out greedy accuracy by checkpoint."""
        found = self.report.get("heldout_accuracy")
        return {k: v for k, v in found.items() if isinstance(v, float)} if isinstance(found, Mapping) else {}


def summarize_run(spec: ExperimentSpec, folder: Path, wall_seconds: Mapping[str, float]) -> RunSummary:
    """Read the stages' folders, write `report.json` and the plot, return what there is to show.

    `wall_seconds` by stage, of this start alone (a stage that was skipped counts 0).
    """
    report: dict[str, JSON] = {
        "name": spec.name,
        "seed": spec.seed,
        "spec_hash": spec_hash(spec),
        "wall_seconds": {**wall_seconds, "total": sum(wall_seconds.values())},
    }
    report |= _rewards(spec, folder)
    results = _evaluations(spec, folder)
    if results:
        report["heldout_accuracy"] = {name: _accuracy(result) for name, result in results.items()}
    atomic_write(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode())
    shown = _shown(spec)
    names = list(results)
    pair = (names[0], names[-1]) if len(names) > 1 else ("", "")
    samples = _before_after(results[pair[0]], results[pair[1]], shown) if pair[0] else ()
    return RunSummary(report, _plot(spec, folder), samples, *pair)


def _rewards(spec: ExperimentSpec, folder: Path) -> dict[str, JSON]:
    """First and last reward of the last reinforcement stage, each a mean over five steps."""
    for stage in reversed(spec.stages):
        if isinstance(stage, RlStageSpec):
            values = [v for _, v in _series(folder / stage_name(stage) / METRICS, "reward")]
            if values:
                window = min(5, len(values))
                first, last = values[:window], values[-window:]
                return {"reward_first": sum(first) / window, "reward_last": sum(last) / window}
    return {}


def _evaluations(spec: ExperimentSpec, folder: Path) -> dict[str, Mapping[str, JSON]]:
    """Results by checkpoint of the last evaluation stage."""
    for stage in reversed(spec.stages):
        if isinstance(stage, EvaluateStageSpec):
            path = folder / stage_name(stage) / "report" / REPORT
            if path.is_file():
                results = json.loads(path.read_bytes())["results"]
                order = [stage_name(s) for s in spec.stages if stage_name(s) in results]
                return {name: results[name] for name in [*order, *(n for n in results if n not in order)]}
    return {}


def _accuracy(result: Mapping[str, JSON]) -> JSON:
    metrics = result["metrics"]
    return metrics["eval/accuracy"] if isinstance(metrics, Mapping) else None


def _shown(spec: ExperimentSpec) -> int:
    return max((s.show_samples for s in spec.stages if isinstance(s, EvaluateStageSpec)), default=0)


def _before_after(before: Mapping[str, JSON], after: Mapping[str, JSON], count: int) -> tuple[BeforeAfter, ...]:
    """Prompts whose answer changed come first."""
    pairs = list(zip(_tasks(before), _tasks(after), strict=True))
    pairs.sort(key=lambda pair: pair[0]["response"] == pair[1]["response"])
    return tuple(
        BeforeAfter(
            prompt=str(one["prompt"]),
            before=str(one["response"]),
            after=str(two["response"]),
            before_reward=_number(one["greedy"]),
            after_reward=_number(two["greedy"]),
        )
        for one, two in pairs[:count]
    )


def _tasks(result: Mapping[str, JSON]) -> Sequence[Mapping[str, JSON]]:
    tasks = result["tasks"]
    return [task for task in tasks if isinstance(task, Mapping)] if isinstance(tasks, Sequence) else []


def _number(value: JSON) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None


def _plot(spec: ExperimentSpec, folder: Path) -> Path | None:
    curves = {
        stage_name(stage): _series(folder / stage_name(stage) / METRICS, "reward")
        for stage in spec.stages
        if isinstance(stage, RlStageSpec)
    }
    if not any(curves.values()):
        return None
    plot_curves(folder / PLOT, curves, title=f"{spec.name}: reward of training rollouts (seed {spec.seed})")
    return folder / PLOT


def _series(path: Path, name: str) -> list[tuple[int, float]]:
    return read_series(path, name) if path.is_file() else []
