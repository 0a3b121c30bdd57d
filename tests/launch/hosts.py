"""Hosts made from network namespaces: each has a name, an address, and a cable to one switch that can be pulled. Needs root and iproute2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NET = "10.231.77"


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str
    cable: str
    """Its end at the switch."""

    def start(self, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """`nrl` on this host."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "nemo_rl_like", *arguments]
        environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "PYTHONPATH", "LANG")}
        environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("ab") as stream:
            return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)

    def answers(self, port: int) -> bool:
        """Whether something listens at this port of the host."""
        listed = _ip("netns", "exec", self.name, "ss", "--listening", "--tcp", "--numeric", "--no-header")
        return any(line.split()[3].endswith(f":{port}") for line in listed.splitlines())

    def cut(self) -> None:
        """Pull the cable."""
        _ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        """Put it back."""
        _ip("link", "set", self.cable, "up")


@contextmanager
def connected(count: int) -> Iterator[list[Host]]:
    """Hosts on one switch, until the end of the block."""
    mark = f"n{os.getpid() % 100000}"
    switch = f"{mark}br"
    hosts = [Host(f"{mark}h{i}", f"{_NET}.{i + 1}", f"{mark}v{i}") for i in range(count)]
    try:
        _ip("link", "add", switch, "type", "bridge")
        _ip("link", "set", switch, "up")
        for host in hosts:
            _plug(host, switch)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", switch], check=False, capture_output=True)


def _plug(host: Host, switch: str) -> None:
    _ip("netns", "add", host.name)
    _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "set", host.cable, "master", switch, "up")
    inside = ("-n", host.name)
    _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "route", "add", "default", "via", f"{_NET}.254")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout
