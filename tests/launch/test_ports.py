"""Laws of ports: a host's block is its own, below the ports of outgoing connections."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.launch.node.ports import Block, PortsTaken, blocks, check_range, take
from nemo_rl_like.spec.launch import PortsSpec


@settings(deadline=None)
@given(st.integers(1024, 30000), st.integers(32, 3000), st.integers(32, 500), st.text(max_size=8))
def test_blocks_are_disjoint_and_inside_the_range(first: int, size: int, per_node: int, key: str) -> None:
    if size < per_node:
        with pytest.raises(ValidationError, match="hold no block"):
            PortsSpec(first=first, last=first + size - 1, per_node=per_node)
        return
    spec = PortsSpec(first=first, last=first + size - 1, per_node=per_node)
    ports = [port for block in blocks(spec, key) for port in range(block.first, block.last + 1)]
    assert len(ports) == len(set(ports)) == size // per_node * per_node
    assert all(spec.first <= port <= spec.last for port in ports)


def test_no_port_of_a_block_is_named_twice() -> None:
    block = Block(12000, 12399)
    named = (
        [flag.split("=")[1] for flag in block.flags(head=True)] + list(block.variables().values()) + [str(block.first)]
    )
    assert len(set(named)) == len(named)
    assert all(block.first <= int(port) <= block.last for port in named)


def test_a_block_that_is_held_goes_to_nobody_else() -> None:
    spec = PortsSpec(first=21000, last=21127, per_node=32)
    held = [take(spec, "job") for _ in range(4)]
    assert len({block.first for block, _ in held}) == 4
    with pytest.raises(PortsTaken, match="21000 to 21127"):
        take(spec, "job")
    for _, listener in held:
        listener.close()
    block, listener = take(spec, "job")
    listener.close()
    assert block == held[0][0]


def test_ports_of_outgoing_connections_are_refused(tmp_path: Path) -> None:
    range_file = tmp_path / "range"
    range_file.write_text("15000\t60999\n")
    with pytest.raises(SpecError, match=r"`launch\.ports` is 12000 to 19999.*set `launch\.ports\.last` below 15000"):
        check_range(PortsSpec(), range_file)
    check_range(PortsSpec(last=14999), range_file)
