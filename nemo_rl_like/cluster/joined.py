"""The Ray that `nrl node` has made for a driver: how the one tells the other. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from nemo_rl_like.artifacts.errors import SpecError

ENV = "NRL_CLUSTER"


@dataclass(frozen=True, slots=True)
class JobCluster:
    """What a job's driver may use. It stands in the driver's environment, not in the spec, so that a later start of the same
    run does not look for a cluster that has gone."""

    address: str | None
    """`host:port` of the Ray head; None: one host, whose Ray the driver starts itself."""
    auth: Literal["disabled", "token"]
    """Ray's authentication mode."""
    kind: Literal["gpu", "cpu"]
    """What ranks run on."""
    devices: int
    """Devices of all hosts that train."""
    nodes: int = 1
    """Hosts."""
    variables: tuple[str, ...] = ()
    """Names of the variables that the spec gives every process (`launch.environment`)."""
    generation_devices: int = 0
    """Devices of all hosts that generate; 0: every host does both."""

    def variable(self) -> dict[str, str]:
        """The environment variable that `of_environment` reads."""
        return {ENV: json.dumps(asdict(self))}


def of_environment(environ: Mapping[str, str]) -> JobCluster | None:
    """The cluster that this process was given; None outside a job. Raises SpecError for a text that is none."""
    text = environ.get(ENV)
    if not text:
        return None
    try:
        found = JobCluster(**json.loads(text))
        return replace(found, variables=tuple(found.variables))
    except (ValueError, TypeError) as error:
        raise SpecError(f"{ENV} is {text!r}, which `nrl node` does not write ({error}); unset it") from error
