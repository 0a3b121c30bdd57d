"""What Slurm must know of a job."""

from __future__ import annotations

from nemo_rl_like.spec.base import Spec


class SlurmSpec(Spec):
    """Where in a Slurm cluster a job runs."""

    partition: str | None = None
    """Partition; default: the cluster's."""
    account: str | None = None
    """Account that is charged; default: the user's."""
