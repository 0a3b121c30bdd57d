"""The banner before a run and the commands after it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from nemo_rl_like.cluster.devices import visible_devices
from nemo_rl_like.observe.terminal import Banner, preference_batch, pretrain_batch, rl_batch, sample_batch, sft_batch
from nemo_rl_like.spec.distill import DistillStageSpec
from nemo_rl_like.spec.experiment import ExperimentSpec, StageSpec, stage_name
from nemo_rl_like.spec.loader import spec_hash
from nemo_rl_like.spec.preference import PreferenceStageSpec
from nemo_rl_like.spec.pretrain import PretrainStageSpec
from nemo_rl_like.spec.reward_model import RewardModelStageSpec
from nemo_rl_like.spec.rl import RlStageSpec
from nemo_rl_like.spec.sample import SampleStageSpec
from nemo_rl_like.spec.sft import SftStageSpec


def banner(spec: ExperimentSpec) -> Banner:
    """What a run of `spec` will do."""
    environment = spec.environment
    devices = visible_devices(spec.cluster)
    asks = (
        None
        if environment is None
        else environment.name or environment.reward or environment.reward_url or environment.prompts
    )
    settings = {
        "spec": f"{spec_hash(spec)[:12]}, seed {spec.seed}",
        "model": f"{_model(spec)}, {spec.model.dtype}",
        "policy": f"{_layout(spec)}, rows {spec.policy.rows}",
        "engine": spec.engine.kind,
        "environment": asks or "none",
        "stages": " -> ".join(stage_name(s) for s in spec.stages),
    }
    batch = [f"{stage_name(s)}: {line}" for s in spec.stages for line in _batch(s)]
    return Banner(spec.name, settings, f"{devices.count} {devices.kind}", batch, spec.output)


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """What to type after a run: (command, what it does)."""
    program, run, target = _program(), shlex.quote(str(folder)), shlex.quote(f"{folder}-hf")
    return [
        (f"{program} eval {run}", "evaluate the last checkpoint on the held-out tasks"),
        (f"{program} chat {run}", "talk to it"),
        (f"{program} export {run} {target}", "write it as a Hugging Face folder"),
    ]


def _program() -> str:
    """How this program is called from here: by its name if the shell finds it (or a job has started it), else by its path."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "nrl"
    found = shutil.which(called.name)
    if found is not None and called.exists() and os.path.samefile(found, called):
        return called.name
    return shlex.quote(os.path.relpath(called)) if called.exists() else "nrl"


def _layout(spec: ExperimentSpec) -> str:
    layout = spec.policy.layout
    always, more = ("dp", "pp", "tp"), ("cp", "ep")
    return " x ".join(
        f"{axis} {getattr(layout, axis)}" for axis in (*always, *more) if axis in always or getattr(layout, axis) > 1
    )


def _model(spec: ExperimentSpec) -> str:
    init = spec.model.init
    if init is None:
        return str(spec.model.path) + (f" with {spec.model.adapter}" if spec.model.adapter else "")
    return f"{init.family} from scratch, {init.layers} layers x {init.hidden_size}"


def _batch(stage: StageSpec) -> list[str]:
    if isinstance(stage, SftStageSpec | RewardModelStageSpec | DistillStageSpec):
        return [sft_batch(stage.examples_per_step, stage.steps)]
    if isinstance(stage, PreferenceStageSpec):
        return [preference_batch(stage.pairs_per_step, stage.steps, unpaired=stage.unpaired)]
    if isinstance(stage, PretrainStageSpec):
        return [pretrain_batch(stage.rows_per_step, stage.sequence_tokens, stage.steps)]
    if isinstance(stage, SampleStageSpec):
        return [sample_batch(stage.tasks, stage.samples_per_prompt, stage.keep)]
    if isinstance(stage, RlStageSpec):
        sizes = (stage.prompts_per_step, stage.samples_per_prompt, stage.updates_per_batch, stage.epochs)
        return [rl_batch(*sizes, stage.steps)]
    return []
