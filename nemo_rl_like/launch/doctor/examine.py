"""All checks of one host, for a job of a spec or for none."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.launch.doctor.finding import Finding
from nemo_rl_like.launch.doctor.gpus import check_gpus
from nemo_rl_like.launch.doctor.limits import check_clock, check_limits
from nemo_rl_like.launch.doctor.network import check_network
from nemo_rl_like.launch.doctor.packages import check_packages
from nemo_rl_like.launch.doctor.storage import check_storage
from nemo_rl_like.spec.cluster import ClusterSpec
from nemo_rl_like.spec.experiment import ExperimentSpec

_FABRIC = Path("/sys/class/infiniband")


def examine(spec: ExperimentSpec | None, shared: Path) -> list[Finding]:
    """Findings of this host, in the order of the checks.

    Args:
        spec: the experiment whose job this host is to carry; None: the host alone.
        shared: the folder that all hosts of the job see.
    """
    hosts = 1 if spec is None else spec.launch.nodes
    promised = None if spec is None or spec.launch.accelerator == "cpu" else spec.launch.devices_per_node
    cluster = ClusterSpec() if spec is None else spec.cluster
    rdma = _FABRIC.is_dir() and any(_FABRIC.iterdir())
    return [
        *check_packages(),
        *check_gpus(promised),
        *check_network(hosts),
        *check_storage(shared, cluster.object_store_gib),
        *check_limits(rdma=rdma),
        *check_clock(),
    ]
