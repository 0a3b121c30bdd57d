"""Addresses and network interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

from nemo_rl_like.artifacts.errors import NrlError

_SIOCGIFADDR = 0x8915
_ANYWHERE = ("192.0.2.1", 9)
"""An address of documentation (RFC 5737): asking for the way there sends nothing."""


class NoAddress(NrlError):
    """A host's name has no address that others reach."""


def resolve(name: str, known: Mapping[str, str]) -> str:
    """IPv4 address of a host: from `launch.addresses`, or by name resolution. Raises NoAddress."""
    if name in known:
        return known[name]
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NoAddress(
            f"host {name!r} has no address here ({error}); name it under `launch.addresses`, as {{{name}: 10.0.0.1}}"
        ) from error
    return str(found[0][4][0])


def own_address(name: str | None, known: Mapping[str, str]) -> str:
    """This host's address for the others: its name's, unless that is a loopback that nobody named; else the default route's."""
    if name is not None:
        found = resolve(name, known)
        if name in known or not found.startswith("127."):
            return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
        except OSError as error:
            raise NoAddress(
                f"this host has no default route ({error}); name its address under `launch.addresses`, as "
                f"{{{name or socket.gethostname()}: 10.0.0.1}}"
            ) from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this IPv4 address; None where none has."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
