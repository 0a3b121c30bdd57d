"""All checks of one host, for a job of a spec or for none."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.launch.doctor.finding import Finding
from nemo_rl_like.launch.doctor.gpus import check_gpus
from nemo_rl_like.launch.doctor.limits import check_clock, check_limits
from nemo_rl_like.launch.doctor.network import FABRIC, check_network
from nemo_rl_like.launch.doctor.packages import check_packages
from nemo_rl_like.launch.doctor.storage import check_storage
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.experiment import ExperimentSpec

logger = logging.getLogger(__name__)


def examine(spec: ExperimentSpec | None, shared: Path, rank: int = 0) -> list[Finding]:
    """Findings of this host, in the order of the checks.

    Args:
        spec: the experiment whose job this host is to carry; None: the host alone.
        shared: the folder that all hosts of the job see.
        rank: this host's in the job.
    """
    hosts = 1 if spec is None else spec.launch.hosts
    promised = None if spec is None or spec.launch.accelerator == "cpu" else spec.launch.group_of(rank).devices_per_node
    cluster = ClusterSpec() if spec is None else spec.cluster
    rdma = FABRIC.is_dir() and any(FABRIC.iterdir())
    return [
        *check_packages(),
        *check_gpus(promised),
        *check_network(hosts, addressed=spec is not None and bool(spec.launch.addresses)),
        *check_storage(shared, cluster.object_store_gib),
        *check_limits(rdma=rdma),
        *check_clock(),
    ]


class HostUnfit(NrlError):
    """A finding of this host would stop the job."""


def require_fit(spec: ExperimentSpec, shared: Path, rank: int = 0) -> None:
    """Examine this host for the job of `spec`; what may be slow or unsafe is logged.

    Raises:
        HostUnfit: lists what would stop the job, each with its fix.
    """
    findings = examine(spec, shared, rank)
    for finding in findings:
        if finding.level == "warn":
            logger.warning("%s: %s; fix: %s", finding.check, finding.what, finding.fix)
    wrong = [f"{f.check}: {f.what}; fix: {f.fix}" for f in findings if f.level == "fail"]
    if wrong:
        host = socket.gethostname()
        told = [f"{host} is not fit for the job (`launch.doctor: false` starts it all the same)", *wrong]
        raise HostUnfit("\n  ".join(told))
