"""The rollout group of a stage: episodes and batches in one process beside the policy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.environment.registry import with_absolute_paths
from nemo_rl_like.model.outline import Outline
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.training.step_services import ROLLOUT, STEPS

ROLLOUT_SERVICE = "nemo_rl_like.rollout.service:RolloutService"
STEP_SERVICE = "nemo_rl_like.training.step_service:StepService"


def context_tokens(spec: ExperimentSpec, config: Outline) -> int:
    """Longest row, in tokens: the engine's limit, never more than the model's."""
    places = config.max_positions - spec.policy.virtual_tokens
    return min(spec.engine.max_context or places, places)


def environment_of(spec: ExperimentSpec) -> EnvironmentSpec | None:
    """The environment block with its files made absolute."""
    return None if spec.environment is None else with_absolute_paths(spec.environment, Path.cwd())


@contextmanager
def worker_group(session: RaySession, name: str = "rollout") -> Iterator[WorkerGroup]:
    """One worker that needs no device."""
    with WorkerGroup.start(name, session=session, axes={"worker": 1}, threads=1, devices=0.0) as group:
        yield group


def host_rollout(
    group: WorkerGroup,
    spec: ExperimentSpec,
    tokenizer_folder: Path,
    config: Outline,
    service: str = ROLLOUT_SERVICE,
) -> None:
    """Host the services `rollout` (of class `service`) and `steps`."""
    environment = environment_of(spec)
    if environment is None:
        raise ValueError("this stage needs an environment")  # the spec's own rules refuse it earlier
    kwargs: dict[str, object] = {
        "environment_json": environment.model_dump_json(),
        "tokenizer_folder": str(tokenizer_folder.resolve()),
        "run_seed": spec.seed,
        "max_context": context_tokens(spec, config),
        "extra_env": {name: os.environ[ref.env] for name, ref in spec.secrets.items() if ref.env in os.environ},
    }
    group.host(ROLLOUT, service, kwargs)
    group.host(STEPS, STEP_SERVICE)
