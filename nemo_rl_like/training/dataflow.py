"""The dataflow of a step: which services run, in which order. `rl.loop` puts another function in the place of `standard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray

from nemo_rl_like.algorithms import entropy, kl
from nemo_rl_like.observe.terminal import Sample
from nemo_rl_like.rollout.summary import RolloutSummary
from nemo_rl_like.training.recipe import StepReport
from nemo_rl_like.training.step_service import PreparedStep
from nemo_rl_like.training.step_services import StepServices

Dataflow = Callable[[StepServices, int], StepReport]
"""Makes one step from its services and its number (from 1)."""


def standard(run: StepServices, step: int) -> StepReport:
    """Rollout, log-probs, values, advantages, updates: what every algorithm block runs."""
    rollout = collect(run, step)
    batch, seen = run.log_probs(rollout.batch)
    batch = run.values(batch)
    prepared = run.advantages(step, batch)
    metrics = {**rollout.metrics, **seen, **prepared.metrics, **run.update(step, prepared)}
    return report(rollout.summary, prepared, {**metrics, **adapt_kl(run, metrics), **adapt_entropy(run, metrics)})


def on_pairs(run: StepServices, step: int) -> StepReport:
    """Rollout, pairs of its samples, updates with preference losses: what a block with `pairs` runs.

    A step in which no two samples differ makes no update.
    """
    batch, summary = run.rollout(step, run.spec.prompts_per_step)
    pairs, metrics = run.pairs(batch)
    if pairs is not None:
        metrics |= run.update_on_pairs(step, pairs)
    return report(summary, None, {**summary.metrics(), **metrics})


@dataclass(frozen=True, slots=True)
class Rollout:
    """The groups of a step."""

    batch: ray.ObjectRef
    summary: RolloutSummary
    """Of the step's first rollout: what the policy does on prompts that nothing has chosen."""
    metrics: dict[str, float]


def collect(run: StepServices, step: int) -> Rollout:
    """The step's groups: those of one rollout, or with dynamic sampling those that have spread, drawn until there are enough.

    A step in which no group has spread goes on with its first rollout.
    """
    wanted, dynamic = run.spec.prompts_per_step, run.spec.algorithm.dynamic_sampling
    batch, summary = run.rollout(step, wanted)
    if dynamic is None:
        return Rollout(batch, summary, summary.metrics())
    part, kept = run.groups_with_spread(batch)
    parts, drawn = [part], wanted
    for _ in range(dynamic.max_refills):
        if kept == wanted:
            break
        more, _ = run.rollout(step, wanted - kept, first_group=drawn)
        drawn += wanted - kept
        part, count = run.groups_with_spread(more)
        parts.append(part)
        kept += count
    found = [part for part in parts if part is not None]
    metrics = {"dynamic_sampling/kept_groups": float(kept), "dynamic_sampling/drawn_groups": float(drawn)}
    return Rollout(run.join(*found) if found else batch, summary, {**summary.metrics(), **metrics})


def adapt_kl(run: StepServices, metrics: Mapping[str, float]) -> dict[str, float]:
    """The KL's coefficient in this step; it is moved towards its target for the next."""
    spec, now = run.spec.algorithm.kl, run.kl_coef
    if spec.adaptive is not None and "kl/k1" in metrics:
        samples = run.spec.prompts_per_step * run.spec.samples_per_prompt
        run.kl_coef = kl.adapted(now, metrics["kl/k1"], spec.adaptive.target, spec.adaptive.horizon, samples)
    return {"kl/coef": now} if spec.coef else {}


def adapt_entropy(run: StepServices, metrics: Mapping[str, float]) -> dict[str, float]:
    """The coefficient of the entropy bonus in this step; `adaptive_entropy` moves it for the next."""
    options, now = run.spec.algorithm.adaptive_entropy, run.entropy_coef
    if options is None:
        return {}
    if "entropy" in metrics:
        run.entropy_level = entropy.adapted(run.entropy_level, metrics["entropy"], options)
        run.entropy_coef = entropy.active(run.entropy_level, metrics["entropy"], options)
    return {"entropy/coef": now}


def report(summary: RolloutSummary, prepared: PreparedStep | None, metrics: Mapping[str, float]) -> StepReport:
    """The step's metrics, and the summary's samples with their advantages, where there are any."""
    advantages = {} if prepared is None else prepared.episode_advantages
    samples = tuple(
        Sample(
            prompt=sample.prompt,
            response=sample.response,
            reward=None if sample.reward != sample.reward else sample.reward,
            advantage=advantages.get(sample.episode_id),
        )
        for sample in summary.samples
    )
    return StepReport(metrics, samples)
