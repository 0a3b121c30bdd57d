"""A drawing of which devices of which hosts a stage's roles stand on, as Ray packs them: one role behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_like.pipeline.forecast import Role
from nemo_rl_like.spec.launch import LaunchSpec


def drawing(roles: Sequence[Role], launch: LaunchSpec) -> list[str]:
    """The lines of `placement` for a job: the engine stands on hosts of its own where the job has such."""
    train, *generate = launch.groups
    if not generate:
        return placement(roles, train.devices_per_node)
    engine = [role for role in roles if role.name == "engine"]
    others = placement([role for role in roles if role.name != "engine"], train.devices_per_node)
    return [*others, *placement(engine, generate[0].devices_per_node, first_host=train.nodes)]


def placement(roles: Sequence[Role], devices_per_host: int, first_host: int = 0) -> list[str]:
    """One line a host: `host 0  0-3 policy 0-3, 4-7 engine 0-3`, and one line of what shares devices with what."""
    hosts: dict[int, list[str]] = {}
    first = 0
    for role in roles:
        end = first + role.ranks
        for host in range(first // devices_per_host, -(-end // devices_per_host)) if role.ranks else ():
            base = host * devices_per_host
            low, high = max(first, base), min(end, base + devices_per_host)
            where, who = _range(low - base, high - base), _range(low - first, high - first)
            hosts.setdefault(host, []).append(f"{where} {role.name} {who}")
        first = end
    lines = [f"host {first_host + host}  " + ", ".join(parts) for host, parts in sorted(hosts.items())]
    sharing = [role.name for role in roles if role.ranks == 0]
    return [*lines, *([f"on the policy's devices, in turn: {', '.join(sharing)}"] if sharing else [])]


def _range(begin: int, end: int) -> str:
    return str(begin) if end == begin + 1 else f"{begin}-{end - 1}"
