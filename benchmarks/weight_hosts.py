"""What a weight sync costs on its way to another host, against a copy of the same bytes in memory.

`python benchmarks/weight_hosts.py --mib 1024 --out benchmarks/results/weight_hosts.json`

Sender and receiver are processes of this host, connected by its loopback: the figures bound what the two ends can do, not what a network gives. Each part is the
median of several rounds: `publish` (copy into shared memory and hash), `fetch` (to the other end's shared memory), `read` (hash there), and `copy`, one
thread's memory copy of the same bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from peer import provenance, write_json

from nemo_rl_like.weights.network import WeightMirror, WeightServer
from nemo_rl_like.weights.shared_memory import SharedMemorySender, read

TENSORS = 64


def main() -> int:
    """Time the parts, write the JSON."""
    options = _options()
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
    process.start()
    each = options.mib * (1 << 20) // TENSORS // 4
    tensors = {f"layer.{i}": torch.randn(each) for i in range(TENSORS)}
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    seconds: dict[str, list[float]] = {"copy": [], "publish": [], "fetch": [], "read": []}
    sender, server = SharedMemorySender(), WeightServer()
    for version in range(options.rounds + 1):
        seconds["copy"].append(_timed(lambda: [copies[name].copy_(tensor) for name, tensor in tensors.items()]))
        started = time.perf_counter()
        handle = sender.publish(version, tensors.items())
        seconds["publish"].append(time.perf_counter() - started)
        here.send(server.offer(handle, "127.0.0.1"))
        fetch, hashed = here.recv()
        seconds["fetch"].append(fetch)
        seconds["read"].append(hashed)
    here.send(None)
    process.join()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    result = {
        "what": f"{options.mib} MiB in {TENSORS} tensors over the loopback; seconds, and ratios to one memory copy",
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "over_copy": {name: round(value / medians["copy"], 2) for name, value in medians.items()},
        **provenance(torch.get_num_threads()),
    }
    write_json(options.out, result)
    return 0


def receive(connection: Connection) -> None:
    """The other host: fetches each offer and hashes what came; answers with the seconds of both, until None comes."""
    mirror = WeightMirror()
    while (offer := connection.recv()) is not None:
        started = time.perf_counter()
        handle = mirror.fetch(offer, "127.0.0.2").handle
        fetch = time.perf_counter() - started
        connection.send((fetch, _timed(lambda handle=handle: sum(1 for _ in read(handle)))))  # type: ignore[misc]


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("weight_hosts.json"))
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
