"""What Kubernetes must know of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_like.spec.base import Spec


class KubernetesSpec(Spec):
    """Where in a Kubernetes cluster a job runs, and as what."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] = "default"
    """Namespace."""
    shape: Literal["job", "rayjob", "raycluster", "jobset"] = "job"
    """`job`: Indexed Job with a headless service; `rayjob`, `raycluster`: KubeRay's; `jobset`: JobSet's."""
