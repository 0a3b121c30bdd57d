"""What is likely to go wrong with a spec although it is valid: each with the field and the fix."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.model.peft_config import other_base
from nemo_rl_like.pipeline.forecast import GIB, Hardware, StageForecast
from nemo_rl_like.spec.experiment import TRAINING_STAGES, ExperimentSpec, stage_name
from nemo_rl_like.spec.launch import LaunchSpec

_ROOM = 0.9
"""Share of a device's memory that a run may plan with: contexts and fragments take the rest."""


def warnings_of(spec: ExperimentSpec, stages: Sequence[StageForecast], hardware: Hardware, seconds: float) -> list[str]:
    """Every warning, in the order of the spec."""
    return [
        *(f"stage {stage.name!r}: nothing is estimated: {stage.problem}" for stage in stages if stage.problem),
        *_devices(spec, stages),
        *_memory(spec, stages, hardware),
        *_saving(spec),
        *_launch(spec, seconds),
        *_adapter(spec),
        *_secrets(spec),
        *_files(spec),
    ]


def _devices(spec: ExperimentSpec, stages: Sequence[StageForecast]) -> Iterator[str]:
    promised = sum(group.devices for group in spec.launch.groups)
    if spec.launch == LaunchSpec():
        return
    for stage in stages:
        if stage.devices > promised:
            yield (
                f"stage {stage.name!r} needs {stage.devices} devices, and `launch` takes {promised} on {spec.launch.hosts} "
                f"host(s); raise `launch.nodes`, or lower `policy.layout`"
            )
    needed = max((stage.devices for stage in stages), default=0)
    if needed and promised >= 2 * needed:
        yield f"`launch` takes {promised} devices, and no stage uses more than {needed}; lower `launch.nodes`, or raise `policy.layout.dp`"


def _memory(spec: ExperimentSpec, stages: Sequence[StageForecast], hardware: Hardware) -> Iterator[str]:
    if spec.launch.accelerator == "cpu":
        return
    for stage in stages:
        needed = stage.memory_of_rank
        if needed is not None and needed > hardware.memory * _ROOM:
            yield (
                f"stage {stage.name!r} is estimated at {needed / GIB:.1f} GiB a rank, and a device has {hardware.memory / GIB:.0f}; "
                "see `nrl layout`, `policy.recompute`, `policy.offload`, or lower `policy.micro_batch_tokens`"
            )


def _saving(spec: ExperimentSpec) -> Iterator[str]:
    if spec.launch == LaunchSpec():
        return
    for stage in spec.stages:
        if isinstance(stage, TRAINING_STAGES) and stage.checkpoint.every_steps == 0:
            yield (
                f"stage {stage_name(stage)!r} saves at its end and on a signal only; a host that is lost takes all of it: set "
                "`checkpoint.every_steps`"
            )


def _launch(spec: ExperimentSpec, seconds: float) -> Iterator[str]:
    launch = spec.launch
    if "disabled" in (spec.cluster.auth, launch.auth):
        yield "`cluster.auth` or `launch.auth` is disabled: whoever reaches Ray's ports runs code as you; leave it out on any shared network"
    if launch.image is not None and "@sha256:" not in launch.image and not launch.image.endswith(".sqsh"):
        yield f"`launch.image` {launch.image} is a tag, which may move; pin it by digest (`name@sha256:...`)"
    if launch.time_limit_min is not None and seconds > launch.time_limit_min * 60:
        yield (
            f"the run is estimated at {seconds / 3600:.1f} h, and `launch.time_limit_min` is {launch.time_limit_min}: it will be started again "
            "after each limit; raise it, or let it (each start resumes)"
        )


def _adapter(spec: ExperimentSpec) -> Iterator[str]:
    seen = [spec.for_stage(stage) for stage in spec.stages]
    merged = [(one.model.path, one.model.adapter) for one in seen]
    gone_on = [(one.model.path, one.policy.lora.path) for one in seen if one.policy.lora is not None]
    for path, adapter in dict.fromkeys([*merged, *gone_on]):
        if path is None or adapter is None:
            continue
        try:
            told = other_base(Path(path), Path(adapter))
        except InputError as error:
            told = str(error)
        if told is not None:
            yield told


def _secrets(spec: ExperimentSpec) -> Iterator[str]:
    for name, secret in spec.secrets.items():
        if secret.env not in os.environ:
            yield f"`secrets.{name}.env` {secret.env} is not set in this environment; export it before the run"


def _files(spec: ExperimentSpec) -> Iterator[str]:
    for stage in spec.stages:
        data = getattr(stage, "data", None)
        path = getattr(data, "path", None)
        if isinstance(path, str) and not Path(path).exists():
            yield f"`stages.{stage_name(stage)}.data.path` {path} does not exist here (looked in {Path.cwd()})"
