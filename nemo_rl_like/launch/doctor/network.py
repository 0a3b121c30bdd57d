"""Network: interfaces that NCCL is told of, fabric, the host's own name, ports, proxies."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl_like.launch.doctor.finding import Finding, ok

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_NET = Path("/sys/class/net")
FABRIC = Path("/sys/class/infiniband")
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
WORKER_PORTS = (20000, 32000)
"""Ports at which ranks meet."""
SLOW = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


def check_network(
    hosts: int, *, addressed: bool = False, environ: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """All of it, for a job of `hosts` hosts; `addressed`: the spec says their addresses, so names do not matter."""
    variables = os.environ if environ is None else environ
    yield from check_interfaces(variables, _NET)
    yield from check_fabric(hosts, variables, FABRIC)
    if not addressed:
        yield from check_name(hosts)
    yield from check_ports(_EPHEMERAL.read_text() if _EPHEMERAL.is_file() else "")
    yield from check_proxies(hosts, variables)


def check_interfaces(environ: Mapping[str, str], net: Path) -> Iterator[Finding]:
    """Interfaces that variables name exist. NCCL reads `=eth0` as exactly, `^lo` as all but, `eth` as a beginning."""
    present = sorted(p.name for p in net.iterdir()) if net.is_dir() else []
    for name in INTERFACES:
        for asked in filter(None, environ.get(name, "").lstrip("^").split(",")):
            exact = asked.removeprefix("=")
            if not any(one == exact or (not asked.startswith("=") and one.startswith(exact)) for one in present):
                yield Finding(
                    "interfaces",
                    "fail",
                    f"{name} names {exact}, and this host has {', '.join(present)}",
                    f"set {name} to one of them, or unset it",
                )
    slow = [name for name in SLOW if environ.get(name) == "1"]
    if slow:
        yield Finding(
            "nccl",
            "warn",
            f"{', '.join(slow)} is set to 1, which turns a fast path off",
            "unset it unless it works around a fault of this fabric",
        )


def check_fabric(hosts: int, environ: Mapping[str, str], fabric: Path) -> Iterator[Finding]:
    """InfiniBand or RoCE ports are up; without any, hosts talk over TCP."""
    states = {
        f"{p.parents[1].name}:{p.name}": (p / "state").read_text().strip()
        for p in sorted(fabric.glob("*/ports/*"))
        if (p / "state").is_file()
    }
    down = [name for name, state in states.items() if "ACTIVE" not in state]
    if hosts > 1 and not states:
        yield Finding(
            "fabric",
            "warn",
            f"no RDMA device, and the job has {hosts} hosts: gradients go over TCP",
            "ask for a partition with InfiniBand or RoCE, or keep `tp` and `pp` inside a host",
        )
    elif down and len(down) < len(states):
        yield Finding(
            "fabric",
            "warn",
            f"ports that are not active: {', '.join(down)}",
            "name the active ones in NCCL_IB_HCA, or have the others mended",
        )
    elif down:
        yield Finding(
            "fabric",
            "fail" if hosts > 1 else "note",
            f"no RDMA port is active ({', '.join(down)})",
            "have the link mended, or set NCCL_IB_DISABLE=1 to go over TCP",
        )
    elif states:
        yield ok("fabric", f"{len(states)} active RDMA port(s)")
    asked = [name.lstrip("^=").split(":")[0] for name in environ.get("NCCL_IB_HCA", "").split(",") if name]
    unknown = [name for name in asked if not any(device.startswith(name) for device in states)]
    if unknown:
        yield Finding(
            "fabric",
            "fail",
            f"NCCL_IB_HCA names {', '.join(unknown)}, and this host has {', '.join(states) or 'no RDMA device'}",
            "set NCCL_IB_HCA to devices of this host, or unset it",
        )


def check_name(hosts: int) -> Iterator[Finding]:
    """The host's name leads to an address that other hosts can reach."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield Finding(
            "host name",
            "warn",
            f"{name} has no address ({error})",
            "add it to /etc/hosts or the name server",
        )
        return
    if hosts > 1 and address.startswith("127."):
        yield Finding(
            "host name",
            "warn",
            f"{name} leads to {address}, which no other host reaches",
            "give the host's own address in /etc/hosts, or in `launch.addresses`",
        )
    else:
        yield ok("host name", f"{name} is {address}")


def check_ports(ephemeral: str) -> Iterator[Finding]:
    """Ranks' ports lie below those that the kernel gives to outgoing connections."""
    found = re.findall(r"\d+", ephemeral)
    low = int(found[0]) if found else WORKER_PORTS[1]
    if low < WORKER_PORTS[1]:
        yield Finding(
            "ports",
            "warn",
            f"outgoing connections take ports from {low}, and ranks meet at {WORKER_PORTS[0]} to {WORKER_PORTS[1] - 1}",
            f"sysctl net.ipv4.ip_local_port_range='{WORKER_PORTS[1]} 60999'",
        )
    else:
        yield ok("ports", f"ranks meet below {low}, where outgoing connections begin")


def check_proxies(hosts: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """A proxy is told to leave hosts of the job alone."""
    proxies = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if environ.get(name)]
    if hosts > 1 and proxies and not (environ.get("no_proxy") or environ.get("NO_PROXY")):
        yield Finding(
            "proxy",
            "warn",
            f"{', '.join(proxies)} is set and no_proxy is not: calls between hosts go to the proxy",
            "list the cluster's networks in no_proxy",
        )
