"""What a service knows about its place in a worker group, and how it names its neighbours in the same process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a worker group; the first argument of every hosted service."""

    group: str
    """Name of the worker group, for example `policy`."""
    rank: int
    """0 .. world_size - 1."""
    world_size: int
    """Ranks in the group."""
    axes: Mapping[str, int]
    """Size of each named axis; the last name varies fastest with the rank."""
    axis_ranks: Mapping[str, int]
    """This rank's coordinate on each axis."""
    master_addr: str
    """Address at which the ranks meet (rank 0's node)."""
    master_port: int
    """TCP port at which the ranks meet."""
    threads: int
    """CPU threads of this rank."""
    log_path: Path
    """File that holds this worker's stdout and stderr."""
    node: str
    """Name of the host this rank runs on."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """Stands in a service's kwargs for another service of the same process, or for one of its attributes."""

    service: str
    """Name under which the other service was hosted."""
    attribute: str | None = None
    """Attribute of it; None = the service itself."""


def world_size(axes: Mapping[str, int]) -> int:
    """Ranks of a group with these axes: their product. Raises ValueError naming an axis that is not positive."""
    for name, size in axes.items():
        if size < 1:
            raise ValueError(f"axis {name!r} has size {size}, must be at least 1")
    return math.prod(axes.values())


def axis_ranks(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Coordinates of `rank` in row-major order: the last axis varies fastest."""
    coordinates: dict[str, int] = {}
    for name in reversed(list(axes)):
        rank, coordinates[name] = divmod(rank, axes[name])
    return {name: coordinates[name] for name in axes}
