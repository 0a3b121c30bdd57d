"""Reinforcement learning as a recipe: a dataflow's steps, each followed by a verified weight sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.artifacts.references import load_function
from nemo_rl_like.rollout.evaluation import EvaluationReport
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.training.dataflow import Dataflow, on_pairs, standard
from nemo_rl_like.training.recipe import StepReport
from nemo_rl_like.training.step_services import ROLLOUT, StepServices


def dataflow_of(spec: RlStageSpec) -> Dataflow:
    """The function that `loop` names, or the one that the algorithm needs. Raises SpecError, InputError."""
    if spec.loop is None:
        return standard if spec.algorithm.pairs is None else on_pairs
    function: Dataflow = load_function(spec.loop, "loop")
    return function


@dataclass(slots=True)
class RlRecipe:
    """Steps of reinforcement learning."""

    services: StepServices
    dataflow: Dataflow = standard

    @property
    def total_steps(self) -> int:
        """Rollout batches."""
        return self.services.spec.steps

    @property
    def updates(self) -> Mapping[str, int]:
        """Optimizer steps made, by model."""
        return self.services.updates

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics of the line that is shown each step."""
        return ("reward", "eval/accuracy", "loss", "entropy", "grad_norm", "completions/mean_length", "timing/step")

    def start(self) -> None:
        """Bring the policy's weights to the engine and prove that they are there."""
        engine = self.services.engine
        if not engine.sync(engine.version):  # the embedded engine's sync has nothing to prove
            engine.probe()

    def before_first_step(self) -> StepReport:
        """The validation figures before training, when there are evaluations."""
        return StepReport(self._evaluate() if self.services.spec.evaluate_every_steps else {})

    def step(self, step: int) -> StepReport:
        """One step of the dataflow, the weight sync, and the evaluation when it is due."""
        run = self.services
        made = self.dataflow(run, step)
        metrics = dict(made.metrics)
        with run.timings.part("sync"):
            metrics |= run.engine.sync(run.engine.version + 1)
        every = run.spec.evaluate_every_steps
        if every and step % every == 0:
            metrics |= self._evaluate()
        return StepReport({**metrics, **run.timings.collect()}, made.samples)

    def state(self) -> dict[str, JSON]:
        """See `StepServices.state`."""
        return self.services.state()

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave."""
        self.services.load_state(state)

    def _evaluate(self) -> dict[str, float]:
        run = self.services
        with run.timings.part("evaluate"):
            got = run.workers.call(ROLLOUT, "evaluate", run.spec.evaluation, run.engine.client(), what="evaluation")
        return cast(EvaluationReport, got).metrics()
