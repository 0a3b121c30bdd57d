"""Who learns one-digit sums in less time: this project or TRL's GRPOTrainer, SmolLM2-135M, the same CPU threads.

One leg a call, added to the JSON: `python benchmarks/smollm2_race.py ours --seed 1 --lr 2e-5` (or `trl`). Then
`python benchmarks/smollm2_race.py report` compares the systems, each at the learning rate at which it was fastest; legs that were
run beside each other, each to a file of its own, are put together by `report FILE...`.

Both ask the same prompts in the same order (8 a step, 8 samples, 12 new tokens, temperature 1, constant learning rate, beta 0,
AdamW, clipping at 1), with the same chat text and grader. Neither evaluates while it trains: the weights are kept at step 0 and
every 5 steps, and one scorer grades them all on the 50 held-out questions (avg@4 at temperature 1, and greedy; the same draws).
Seconds are the steps' wall time; starting, saving and scoring are apart. A plot of the curves lies beside the JSON. *Reached*: two evaluations in a row at 0.8 or above,
where TRL's leg ends; ours makes all its steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peer import Question, one_rank, provenance, trl_trainer, write_json
from rewards import first_integer
from smollm2_curves import REACHED, reached
from transformers import TrainerCallback

from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.observe.jsonl import read_lines
from nemo_rl_like.rollout.taskorder import TaskOrder, task_list
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec, resolved_yaml
from nemo_rl_like.spec.rl import RlStageSpec

SPEC = Path("configs/smollm2_arithmetic.yaml")
RATES = (1e-5, 2e-5, 3e-5)
EVERY = 5
IDENTITY = ("system", "engine", "seed", "lr")


def main() -> int:
    """Run a leg, or compare those that were run."""
    options = _options()
    legs = json.loads(options.out.read_text())["legs"] if options.out.exists() else []
    if options.what == "report":
        legs = merged([legs, *(json.loads(file.read_text())["legs"] for file in options.files)])
    else:
        leg = _leg(options)
        legs = merged([legs, [leg]])
        print({k: leg[k] for k in (*IDENTITY, "reached", "training_seconds", "start_seconds")})
    comparison = compare(legs)
    write_json(options.out, {"legs": legs, "comparison": comparison})
    plot(legs, comparison, options.out.with_suffix(".png"))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ours", "trl", "report"))
    parser.add_argument("files", nargs="*", type=Path, help="of `report`: JSON files with more legs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-5, choices=RATES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="TRL starts no step after this many")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded", help="of `ours`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("runs/smollm2_race"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/smollm2_race.json"))
    return parser.parse_args()


def _leg(options: argparse.Namespace) -> dict[str, Any]:
    folder = options.scratch / f"{options.what}-{options.seed}-{options.lr:g}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec = _spec(options, folder)
    with Scorer(spec, folder, options.threads) as scorer:
        steps = _train_ours(spec, folder) if options.what == "ours" else _train_trl(spec, folder, options, scorer)
        curve = _curve(steps, scorer)
    shutil.rmtree(folder)
    return {
        "system": options.what,
        "engine": options.engine if options.what == "ours" else "transformers",
        "seed": options.seed,
        "lr": options.lr,
        "reached": reached(curve),
        "training_seconds": round(sum(step["seconds"] for step in steps), 1),
        "start_seconds": round(steps[0]["began"], 1),
        "curve": curve,
        "measured": provenance(options.threads),
    }


def _spec(options: argparse.Namespace, folder: Path) -> ExperimentSpec:
    """The config's RL stage alone, without evaluations, with a checkpoint every few steps."""
    overrides = [
        f"seed={options.seed}",
        f"output={folder / 'run'}",
        f"engine.kind={options.engine}",
        f"policy.threads_per_rank={options.threads}",
        f"stages.grpo.steps={options.steps}",
        f"stages.grpo.optimizer.lr={options.lr}",
        "stages.grpo.evaluate_every_steps=0",
        f"stages.grpo.checkpoint.every_steps={EVERY}",
        "stages.grpo.checkpoint.keep_last=1000",
    ]
    spec = load_spec(SPEC, overrides)
    return spec.model_copy(update={"stages": spec.stages[:1]})


def _stage(spec: ExperimentSpec) -> RlStageSpec:
    (stage,) = spec.stages
    if not isinstance(stage, RlStageSpec):
        raise TypeError(f"the first stage of {SPEC} must be `rl`, got {stage.kind}")
    return stage


# -- the two systems: one {step, seconds, reward, began} a step, weights in <folder>/step_<n>/weights


def _train_ours(spec: ExperimentSpec, folder: Path) -> list[dict[str, float]]:
    file = folder / "spec.yaml"
    file.write_text(resolved_yaml(spec))
    began = time.perf_counter()
    subprocess.run([str(Path(sys.executable).with_name("nrl")), "run", str(file), "--plain"], check=True)
    wall = time.perf_counter() - began
    stage = folder / "run" / _stage(spec).name
    rows = [row for row in read_lines(stage / "metrics.jsonl") if row["step"]]
    steps = [{"step": r["step"], "seconds": r["timing/step"], "reward": r["reward"]} for r in rows]
    apart = wall - sum(step["seconds"] for step in steps)
    for checkpoint in (stage / "checkpoints").glob("step_*"):
        checkpoint.rename(folder / checkpoint.name)
    return [{**step, "began": apart} for step in steps]


def _train_trl(
    spec: ExperimentSpec, folder: Path, options: argparse.Namespace, scorer: Scorer
) -> list[dict[str, float]]:
    import torch

    torch.set_num_threads(options.threads)
    stage, clock = _stage(spec), Clock(folder, scorer, options.minutes)
    settings = {
        "per_device_train_batch_size": stage.prompts_per_step * stage.samples_per_prompt,
        "num_generations": stage.samples_per_prompt,
        "max_completion_length": stage.sampling.max_new_tokens,
        "max_steps": stage.steps,
        "learning_rate": stage.optimizer.lr,
        "seed": spec.seed,
    }
    trl_trainer(Path(str(spec.model.path)), _asked(spec), first_integer, [clock], folder, settings).train()
    return clock.steps


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times each of TRL's steps, keeps the weights every few, and ends the leg once the level is reached."""

    def __init__(self, folder: Path, scorer: Scorer, minutes: float) -> None:
        self._folder, self._scorer, self._minutes = folder, scorer, minutes
        self._started = time.perf_counter()
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the step's clock."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop it; save, score and look whether to go on, off the clock."""
        seconds = time.perf_counter() - self._began
        self.steps.append({"step": state.global_step, "seconds": seconds, "began": self._began - self._started})
        if state.global_step % EVERY == 0:
            kwargs["model"].save_pretrained(self._folder / f"step_{state.global_step}" / "weights")
        trained = sum(step["seconds"] for step in self.steps)
        control.should_training_stop = (
            trained > 60 * self._minutes or reached(_curve(self.steps, self._scorer)) is not None
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take the step's reward."""
        if logs and "reward" in logs:
            self.steps[-1]["reward"] = float(logs["reward"])


def _asked(spec: ExperimentSpec) -> list[Question]:
    """Our run's prompts in its order."""
    if spec.environment is None:
        raise ValueError(f"{SPEC} has no environment")
    source, stage = resolve(spec.environment), _stage(spec)
    tasks = {task.id: task for task in source.tasks("train")}
    order = TaskOrder(task_list("train", list(tasks.values())), spec.seed)
    drawn = order.draw(order.start(), stage.steps * stage.prompts_per_step)
    suffix = str(spec.environment.config["suffix"])
    return [Question(f"{tasks[i].data['question']}{suffix}", str(tasks[i].data["answer"])) for i in drawn]


# -- one scorer for both


class Scorer:
    """Grades the weights that a leg kept, each once, on the held-out questions."""

    def __init__(self, spec: ExperimentSpec, folder: Path, threads: int) -> None:
        from nemo_rl_like.generation.embedded import EmbeddedEngine
        from nemo_rl_like.model.hf_config import ModelConfig
        from nemo_rl_like.policy.rank import PolicyRank
        from nemo_rl_like.rollout.service import RolloutService

        evaluation = _stage(spec).evaluation
        if spec.environment is None or evaluation is None:
            raise ValueError(f"{SPEC} must have an environment and an evaluation")
        model, context = str(spec.model.path), one_rank(threads)
        self._folder, self._evaluation = folder, evaluation
        self._rank = PolicyRank(context, folder=model, policy=spec.policy, dtype="float32")
        self._engine = EmbeddedEngine(context, model_handle=self._rank.model, engine=spec.engine)
        self._service = RolloutService(
            None,
            environment_json=spec.environment.model_dump_json(),
            tokenizer_folder=model,
            run_seed=0,
            max_context=spec.engine.max_context or ModelConfig.from_hf_folder(Path(model)).max_positions,
        )
        self._known = {0: self._grade()}

    def at(self, step: int) -> dict[str, Any]:
        """The held-out figures after a step; empty where no weights were kept."""
        kept = self._folder / f"step_{step}"
        if step not in self._known and kept.exists():
            self._rank.load(str(kept), None)
            self._known[step] = self._grade()
        return self._known.get(step, {})

    def _grade(self) -> dict[str, Any]:
        report = self._service.evaluate(self._evaluation, self._engine)
        return {"heldout_avg@4": report.sampled, "heldout_greedy": report.greedy}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.close()


def _curve(steps: Sequence[Mapping[str, float]], scorer: Scorer) -> list[dict[str, Any]]:
    """Training seconds until the end of each step, its reward, and the held-out figures where weights were kept."""
    seconds = 0.0
    curve: list[dict[str, Any]] = []
    for step in [{"step": 0, "seconds": 0.0}, *steps]:
        seconds += step["seconds"]
        point = {"step": step["step"], "seconds": round(seconds, 2), "reward": step.get("reward")}
        curve.append({**point, **scorer.at(int(step["step"]))})
    return curve


# -- comparison


def merged(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every leg once, in order; of the same leg the last one."""
    found = {tuple(leg[k] for k in IDENTITY): leg for part in parts for leg in part}
    return [found[name] for name in sorted(found)]


def compare(legs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By system: the learning rate at which it was fastest on the median of its seeds, and seconds by rate and seed."""
    out: dict[str, Any] = {}
    for system in sorted({_name(leg) for leg in legs}):
        mine = [leg for leg in legs if _name(leg) == system]
        by_rate = {
            lr: {leg["seed"]: leg["reached"] and leg["reached"]["seconds"] for leg in mine if leg["lr"] == lr}
            for lr in sorted({leg["lr"] for leg in mine})
        }
        best = min(by_rate, key=lambda lr: statistics.median(s or float("inf") for s in by_rate[lr].values()))
        out[system] = {"best_lr": best, f"seconds_to_{REACHED:g}_by_rate_and_seed": by_rate}
    return out


def plot(legs: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any], path: Path) -> None:
    """Held-out avg@4 over training seconds (log scale) and over steps, each system at its best rate, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    views = (("seconds", "training seconds", "symlog"), ("step", "step", "linear"))
    for axes, (x, label, scale) in zip(figure.subplots(1, 2, sharey=True), views, strict=True):
        for colour, (system, found) in enumerate(comparison.items()):
            chosen = [leg for leg in legs if _name(leg) == system and leg["lr"] == found["best_lr"]]
            for i, leg in enumerate(chosen):
                points = [point for point in leg["curve"] if "heldout_avg@4" in point]
                text = f"{system}, lr {leg['lr']:g}" if i == 0 else None
                axes.plot([p[x] for p in points], [p["heldout_avg@4"] for p in points], f"C{colour}.-", label=text)
        axes.axhline(REACHED, color="grey", linewidth=0.7, linestyle="--")
        axes.set_xscale(scale, **({"linthresh": 10} if scale == "symlog" else {}))
        axes.set(xlabel=label, ylim=(0, 1.02), xlim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out avg@4")
    figure.axes[0].legend()
    figure.suptitle("SmolLM2-135M, one-digit sums, GRPO on the same prompts: a line a seed")
    canvas.print_png(str(path))


def _name(leg: Mapping[str, Any]) -> str:
    return f"{leg['system']} ({leg['engine']})"


if __name__ == "__main__":
    raise SystemExit(main())
