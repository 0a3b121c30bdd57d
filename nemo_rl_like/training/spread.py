"""Published weights on every host that has a replica: each host that holds them serves the next, so n hosts take log2(n + 1) transfers in a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.weights.network import Offer
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle


@dataclass(frozen=True, slots=True)
class Place:
    """A host with replicas, and what they read."""

    ranks: tuple[int, ...]
    """Its replicas."""
    handle: SharedMemoryHandle


@contextmanager
def spread(policy: Policy, engine: WorkerGroup, service: str, version: int) -> Iterator[tuple[Place, ...]]:
    """Publish the policy's weights as `version` and bring them to every host of `engine`, whose ranks host `service`; gives the memory
    back when the block ends well.

    Raises WeightSyncError naming the replica and the host from which the weights did not come.
    """
    hosts = by_host(engine.addresses)
    home = policy.group.addresses[0]
    handle = policy.publish(version)
    others = [address for address in hosts if address != home]
    handles = {home: handle}
    if others:
        handles |= _mirrored(policy.offer(handle), others, hosts, engine, service)
    yield tuple(Place(ranks, handles[address]) for address, ranks in hosts.items())
    if others:
        first = [hosts[address][0] for address in others]
        engine.wait(engine.submit(service, "unmirror", ranks=first, what=f"end of the mirrors of version {version}"))
    policy.withdraw()


def by_host(addresses: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Ranks at each address, in order of rank."""
    return {
        address: tuple(rank for rank, at in enumerate(addresses) if at == address)
        for address in dict.fromkeys(addresses)
    }


def rounds(waiting: Sequence[str], first: str) -> Iterator[list[tuple[str, str]]]:
    """Who fetches from whom, a round at a time: (source, receiver). Every holder serves one receiver a round."""
    holders, left = [first], list(waiting)
    while left:
        pairs = list(zip(holders, left, strict=False))
        yield pairs
        holders += [receiver for _, receiver in pairs]
        left = left[len(pairs) :]


def _mirrored(
    offer: Offer, others: Sequence[str], hosts: Mapping[str, tuple[int, ...]], engine: WorkerGroup, service: str
) -> dict[str, SharedMemoryHandle]:
    """The handle of each other host, whose first replica fetches."""
    offers = {offer.address: offer}
    what = f"weights of version {offer.handle.manifest.version} on their way to other hosts"
    for pairs in rounds(others, offer.address):
        calls = [
            engine.submit(service, "mirror", offers[source], receiver, ranks=hosts[receiver][:1], what=what)
            for source, receiver in pairs
        ]
        for (_, receiver), call in zip(pairs, calls, strict=True):
            offers[receiver] = cast(Offer, engine.results(call)[0])
    return {address: offers[address].handle for address in others}
