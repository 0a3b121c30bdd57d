"""Jobs of the tests: a small experiment whose launch block varies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.experiment import ExperimentSpec

FOLDER = Path("/submissions/0001")
IMAGE = "registry.example/nrl@sha256:" + "0" * 64
CLAIM = {"claim": "work", "path": "/data"}
SHAPES = ("job", "jobset", "rayjob", "raycluster")
FULL: dict[str, Any] = {
    "namespace": "nrl",
    "context": "training",
    "priority_class": "high",
    "service_account": "nrl",
    "image_pull_secrets": ["registry"],
    "runtime_class": "nvidia",
    "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "team", "value": "rl"}],
    "topology": [
        {"key": "topology.kubernetes.io/zone", "place": "together"},
        {"key": "example.com/rack", "place": "together", "required": False},
        {"key": "kubernetes.io/hostname", "place": "apart"},
    ],
    "labels": {"team": "rl"},
    "annotations": {"example.com/cost-centre": "42"},
    "claims": [CLAIM, {"claim": "models", "path": "/models", "sub_path": "hub", "read_only": True}],
    "rdma": {"resource": "rdma/hca_shared_devices_a", "count": 8},
    "shm_gib": 64.0,
}
"""Every field of `launch.kubernetes` but the queue and the shape."""


def make_job(name: str = "tiny", *, secrets: dict[str, Any] | None = None, **launch: Any) -> Job:
    """A job on one host with one volume; `launch` replaces fields of the launch block, `kubernetes` among them field by field."""
    kubernetes = {"claims": [CLAIM], **launch.pop("kubernetes", {})}
    return Job(
        name, make_spec({"image": IMAGE, **launch, "kubernetes": kubernetes}, secrets or {}), Path("/submissions/0001")
    )


def make_spec(
    launch: dict[str, Any], secrets: dict[str, Any] | None = None, output: str = "/data/run"
) -> ExperimentSpec:
    """A small experiment with this launch block."""
    values = {
        "output": output,
        "model": {"init": {}, "tokenizer": {"characters": "0123456789+="}},
        "environment": {"name": "arithmetic"},
        "stages": [{"kind": "rl"}],
        "secrets": secrets or {},
        "launch": launch,
    }
    return ExperimentSpec.model_validate(values)


def full_job(shape: str, queue: str | None) -> Job:
    """Two hosts with every field that the shape can honour."""
    kubernetes = {**FULL, "shape": shape, "queue": None if queue is None else {"kind": queue, "name": "research"}}
    ray = shape in ("rayjob", "raycluster")
    return make_job(
        "grpo-0001",
        secrets={"HUB": {"env": "HF_TOKEN", "kubernetes": {"secret": "hub", "key": "token"}}},
        nodes=2,
        cpus_per_node=96,
        memory_gib_per_node=512.0,
        time_limit_min=None if ray else 240,
        retries=0 if shape == "raycluster" else 3,
        environment={"NCCL_DEBUG": "WARN", "PRICE": "$(HOME) $5"},
        kubernetes=kubernetes,
    )
