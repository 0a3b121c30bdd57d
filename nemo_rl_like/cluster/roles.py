"""Hosts that train and hosts that generate, told apart by a resource of Ray that each host of a kind has."""

from __future__ import annotations

from nemo_rl_like.spec.hosts import HostRole

_SHARE = 1e-3
"""What a worker takes of its host's resource: a host carries up to a thousand."""


def of_host(role: HostRole) -> dict[str, float]:
    """Resources of a host beside its devices."""
    return {_name(role): 1.0}


def of_worker(role: HostRole) -> dict[str, float]:
    """What a worker asks for that stands on such a host."""
    return {_name(role): _SHARE}


def _name(role: HostRole) -> str:
    return f"nrl_{role}"
