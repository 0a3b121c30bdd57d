"""Who learns one-digit sums in less time: this project or TRL's GRPOTrainer, SmolLM2-135M, the same CPU threads.

One leg a call, added to the JSON: `python benchmarks/smollm2_race.py ours --seed 1 --lr 2e-5` (or `trl`). Then
`python benchmarks/smollm2_race.py report` compares the systems, each at the learning rate at which it was fastest; legs that were
run beside each other, each to a file of its own, are put together by `report FILE...`.

Both ask the same prompts in the same order (8 a step, 8 samples, 12 new tokens, temperature 1, constant learning rate, beta 0,
AdamW, clipping at 1), with the same chat text and grader. Neither evaluates while it trains: the weights are kept at step 0 and
every 5 steps, and one scorer grades them all on the 50 held-out questions (avg@4 at temperature 1, and greedy; the same draws).
Seconds are the steps' wall time; starting, saving and scoring are apart. *Reached*: two evaluations in a row at 0.8 or above.
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
from typing import Any

from peer import Question, one_rank, provenance, trl_trainer, write_json
from rewards import first_integer
from smollm2_curves import REACHED, reached

from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.observe.jsonl import read_lines
from nemo_rl_like.rollout.taskorder import TaskOrder, task_list
from nemo_rl_like.spec.experiment import ExperimentSpec, RlStageSpec
from nemo_rl_like.spec.loader import load_spec, resolved_yaml

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
    write_json(options.out, {"legs": legs, "comparison": compare(legs)})
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
    spec = _spec(options, folder)
    began = time.perf_counter()
    steps = _train_ours(spec, folder) if options.what == "ours" else _train_trl(spec, folder, options)
    wall = time.perf_counter() - began
    curve = _scored(spec, folder, steps, options.threads)
    shutil.rmtree(folder)
    training = sum(step["seconds"] for step in steps)
    return {
        "system": options.what,
        "engine": options.engine if options.what == "ours" else "transformers",
        "seed": options.seed,
        "lr": options.lr,
        "reached": reached(curve),
        "training_seconds": round(training, 1),
        "start_seconds": round(steps[0]["began"], 1),
        "wall_seconds": round(wall, 1),
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
    folder.mkdir(parents=True)
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


def _train_trl(spec: ExperimentSpec, folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(options.threads)
    stage = _stage(spec)
    steps: list[dict[str, float]] = []
    started = time.perf_counter()

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Times each step and keeps the weights every few."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - self.began
            steps.append({"step": state.global_step, "seconds": seconds, "began": self.began - started})
            if state.global_step % EVERY == 0:
                kwargs["model"].save_pretrained(folder / f"step_{state.global_step}" / "weights")
            if time.perf_counter() - started > 60 * options.minutes:
                control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "reward" in logs:
                steps[-1]["reward"] = float(logs["reward"])

    settings = {
        "per_device_train_batch_size": stage.prompts_per_step * stage.samples_per_prompt,
        "num_generations": stage.samples_per_prompt,
        "max_completion_length": stage.sampling.max_new_tokens,
        "max_steps": stage.steps,
        "learning_rate": stage.optimizer.lr,
        "seed": spec.seed,
    }
    asked = _asked(spec)
    trl_trainer(Path(str(spec.model.path)), asked, first_integer, [Clock()], folder, settings).train()
    return steps


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


def _scored(
    spec: ExperimentSpec, folder: Path, steps: Sequence[Mapping[str, float]], threads: int
) -> list[dict[str, Any]]:
    """The curve: each step's training seconds and reward, and the held-out figures where weights were kept."""
    from nemo_rl_like.generation.embedded import EmbeddedEngine
    from nemo_rl_like.policy.rank import PolicyRank
    from nemo_rl_like.rollout.service import RolloutService

    if spec.environment is None or _stage(spec).evaluation is None:
        raise ValueError(f"{SPEC} must have an environment and an evaluation")
    model, context = str(spec.model.path), one_rank(threads)
    rank = PolicyRank(context, folder=model, policy=spec.policy, dtype="float32")
    engine = EmbeddedEngine(context, model_handle=rank.model, engine=spec.engine)
    service = RolloutService(
        None,
        environment_json=spec.environment.model_dump_json(),
        tokenizer_folder=model,
        run_seed=0,
        max_context=spec.engine.max_context or rank.config.max_positions,
    )
    seconds = 0.0
    curve: list[dict[str, Any]] = []
    try:
        for step in [{"step": 0, "seconds": 0.0, "reward": None}, *steps]:
            seconds += step["seconds"] or 0.0
            point: dict[str, Any] = {"step": step["step"], "seconds": round(seconds, 2), "reward": step.get("reward")}
            kept = folder / f"step_{step['step']}"
            if kept.exists() or step["step"] == 0:
                if kept.exists():
                    rank.load(str(kept), None)
                report = service.evaluate(_stage(spec).evaluation, engine)
                point |= {"heldout_avg@4": report.sampled, "heldout_greedy": report.greedy}
            curve.append(point)
    finally:
        service.close()
    return curve


# -- comparison


def merged(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every leg once, in order; of the same leg the last one."""
    found = {tuple(leg[k] for k in IDENTITY): leg for part in parts for leg in part}
    return [found[name] for name in sorted(found)]


def compare(legs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By system: the learning rate at which it was fastest on the median of its seeds, and the seconds by seed there."""
    out: dict[str, Any] = {}
    for system in sorted({f"{leg['system']} ({leg['engine']})" for leg in legs}):
        mine = [leg for leg in legs if f"{leg['system']} ({leg['engine']})" == system]
        by_rate = {
            lr: {leg["seed"]: leg["reached"] and leg["reached"]["seconds"] for leg in mine if leg["lr"] == lr}
            for lr in sorted({leg["lr"] for leg in mine})
        }
        best = min(by_rate, key=lambda lr: statistics.median(s or float("inf") for s in by_rate[lr].values()))
        out[system] = {"best_lr": best, f"seconds_to_{REACHED:g}_by_seed": by_rate[best], "rates_tried": list(by_rate)}
    return out


if __name__ == "__main__":
    raise SystemExit(main())
