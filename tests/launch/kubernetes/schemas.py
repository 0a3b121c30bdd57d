"""Strict checks of manifests by others' schemas: Kubernetes' own, KubeRay's CRDs, and the JobSet models of Kubeflow's trainer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from kubeflow_trainer_api import models

KUBERNETES = "1.33"
"""The oldest version that has every field which jobs use."""


class Unfit(Exception):
    """A manifest that the API server would refuse; the message names field and reason."""


def check(manifest: dict[str, Any]) -> None:
    """Raise Unfit unless the manifest fits its kind, unknown fields included."""
    api, kind = manifest["apiVersion"], manifest["kind"]
    if api.startswith("ray.io/"):
        _check_ray(manifest)
    elif kind == "JobSet":
        _check_jobset(manifest)
    elif kind != "PodGroup":  # no package has Volcano's schema
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Unfit(str(error)) from None


@cache
def _ray_schema(kind: str) -> jsonschema.Draft7Validator:
    whole = json.loads((Path(__file__).parent / "data/kuberay.json").read_text(encoding="utf-8"))
    return jsonschema.Draft7Validator({**whole["kinds"][kind], "definitions": whole["definitions"]})


def _check_ray(manifest: dict[str, Any]) -> None:
    for error in _ray_schema(manifest["kind"]).iter_errors(manifest):
        raise Unfit(f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}")


def _check_jobset(manifest: dict[str, Any]) -> None:
    try:
        kept = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    except ValueError as error:
        raise Unfit(str(error)) from None
    lost = sorted(paths(manifest) - paths(kept))
    if lost:
        raise Unfit(f"unknown field {lost[0]}")
    for part in manifest["spec"]["replicatedJobs"]:
        check(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": part["name"]},
                "spec": part["template"]["spec"],
            }
        )


def paths(value: Any, above: str = "") -> set[str]:
    """Every key of a manifest, with its way."""
    if isinstance(value, dict):
        return {f"{above}.{k}" for k in value}.union(*(paths(v, f"{above}.{k}") for k, v in value.items()))
    if isinstance(value, list):
        return set().union(*(paths(v, f"{above}[{i}]") for i, v in enumerate(value)))
    return set()
