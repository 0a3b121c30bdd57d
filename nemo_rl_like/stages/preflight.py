"""What can be found wrong before anything starts: weights, tokenizer, layout, devices, secrets."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.cluster.devices import require_devices
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import make_tokenizer
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.stages.workers import environment_of


def problems_of(spec: ExperimentSpec, *further: Callable[[], object]) -> list[str]:
    """What would stop a stage that runs a policy: the messages of the checks that raise an error meant for users."""
    common = (check_model, check_devices, check_environment, check_secrets)
    found: list[str] = []
    for check in (*(partial(check, spec) for check in common), *further):
        try:
            check()
        except NrlError as error:
            found.append(str(error))
    return found


def check_model(spec: ExperimentSpec) -> None:
    """Configuration, layout, weights' headers and tokenizer. Raises InputError, SpecError."""
    if spec.model.init is not None:
        assert spec.model.tokenizer is not None
        tokenizer = make_tokenizer(spec.model.tokenizer)
        ModelConfig.from_init(spec.model.init, len(tokenizer)).check_layout(spec.policy.layout)
        Renderer(tokenizer, "model.tokenizer")
        return
    folder = Path(str(spec.model.path))
    config = ModelConfig.from_hf_folder(folder)
    config.check_layout(spec.policy.layout)
    with SafetensorsReader(folder):
        pass
    if spec.model.tokenizer is not None:
        Renderer(make_tokenizer(spec.model.tokenizer), "model.tokenizer")
    else:
        Renderer.load(folder)


def check_devices(spec: ExperimentSpec) -> None:
    """A device for every rank. Raises SpecError."""
    layout = spec.policy.layout
    require_devices(layout.dp * layout.pp * layout.tp, spec.cluster)


def check_environment(spec: ExperimentSpec) -> None:
    """The environment exists, its settings fit, and its train split is not empty. Raises SpecError, InputError."""
    environment = environment_of(spec)
    if environment is not None:
        resolve(environment)


def check_secrets(spec: ExperimentSpec) -> None:
    """Every secret's environment variable is set. Raises NrlError."""
    missing = sorted(
        f"secrets.{name}.env: {ref.env}" for name, ref in spec.secrets.items() if ref.env not in os.environ
    )
    if missing:
        raise NrlError(f"{', '.join(missing)}: not set in this environment; export it before the run")
