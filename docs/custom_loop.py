"""A dataflow of one's own: train only prompts that the policy solves sometimes. Run: nrl run configs/algorithms/custom_loop.yaml"""

from __future__ import annotations

from nemo_rl_like.training.dataflow import report
from nemo_rl_like.training.recipe import StepReport
from nemo_rl_like.training.step_services import StepServices


def step(run: StepServices, number: int) -> StepReport:
    """One step: groups with a mean score inside [0.2, 0.8]; all of them if there is none."""
    batch, summary = run.rollout(number, run.spec.prompts_per_step)
    chosen, groups = run.select_groups(batch, 0.2, 0.8)
    batch, seen = run.log_probs(batch if chosen is None else chosen)
    prepared = run.advantages(number, run.values(batch))
    metrics = {**summary.metrics(), **seen, **prepared.metrics, "chosen_groups": float(groups)}
    return report(summary, prepared, {**metrics, **run.update(number, prepared)})
