"""What every target with a container asks of a spec: each message names the field, its value, the limit and the fix."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.spec.experiment import ExperimentSpec


def image(spec: ExperimentSpec) -> Iterator[str]:
    """An image is given, and no option of a program."""
    given = spec.launch.image
    if given is None:
        yield "`launch.image` is not set; give an image, best by digest (`name@sha256:...`)"
    elif not given[:1].isalnum():
        yield f"`launch.image` is {given!r}, which is no image of a registry; write `registry/name@sha256:...`"


def variables(spec: ExperimentSpec, taken: Collection[str]) -> Iterator[str]:
    """No variable is set twice.

    Args:
        taken: names that the job sets itself.
    """
    for name in spec.launch.environment:
        if name in taken:
            yield f"`launch.environment.{name}` is set by the job itself; remove it"
    for key, secret in spec.secrets.items():
        if secret.env in taken or secret.env in spec.launch.environment:
            yield f"`secrets.{key}.env` is {secret.env}, which `launch.environment` or the job itself sets too; rename one"


def paths(spec: ExperimentSpec, field: str, folders: Collection[str]) -> Iterator[str]:
    """Every file and folder that the experiment reads is one that the container sees.

    Args:
        field: the field that lists `folders`.
        folders: what is mounted, by its path in the container.
    """
    for where, path in _paths(spec.model_dump(mode="json", exclude={"launch", "output"}), ""):
        inside = any(PurePosixPath(path).is_relative_to(folder) for folder in folders)
        if ".." in PurePosixPath(path).parts or not inside:
            there = ", ".join(folders) or "none"
            yield f"`{where}` is {path!r}, which the container does not see; write an absolute path below one of its folders (`{field}`: {there})"


def _paths(value: JSON, where: str) -> Iterator[tuple[str, str]]:
    """Values of all fields that name files or folders, with their place."""
    if isinstance(value, str):
        if where.rsplit(".", 1)[-1].partition("[")[0] in ("path", "paths", "prompts", "adapter"):
            yield where, value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _paths(below, f"{where}.{key}".lstrip("."))
    elif isinstance(value, Sequence):
        for index, below in enumerate(value):
            yield from _paths(below, f"{where}[{index}]")


def memory(spec: ExperimentSpec, field: str, shm_gib: float) -> Iterator[str]:
    """/dev/shm fits into the memory, and Ray's object store into /dev/shm.

    Args:
        field: the field that holds `shm_gib`.
    """
    total = spec.launch.memory_gib_per_node
    if total is not None and shm_gib >= total:
        yield (
            f"`{field}` is {shm_gib:g}, and its pages count in `launch.memory_gib_per_node`, which is {total:g}; make it smaller, or the memory larger"
        )
    if spec.cluster.object_store_gib > shm_gib:
        yield (
            f"`cluster.object_store_gib` is {spec.cluster.object_store_gib:g}, and Ray's object store lies in /dev/shm, which has {shm_gib:g} GiB; "
            f"raise `{field}`"
        )
