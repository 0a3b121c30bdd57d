"""A data-parallel rank that is alone sends its buffers nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from tests.policy.ranks import run_ranks
from tests.policy.test_laws import make_folder, step


def collectives(rank: int, world: int, port: int, folder: Path, policy: PolicySpec) -> dict[str, int]:
    """Calls of the buffers' collectives in one step."""
    from nemo_rl_like.model import mcore  # the shim comes before Megatron

    del mcore
    from megatron.core.distributed import param_and_grad_buffer as buffers

    calls = {"dist_reduce_scatter_func": 0, "dist_all_gather_func": 0}

    def counted(name: str) -> Any:
        inner = vars(buffers)[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return inner(*args, **kwargs)

        return call

    for name in calls:
        vars(buffers)[name] = counted(name)
    step(rank, world, port, folder, policy, None)
    return calls


def test_one_data_parallel_rank_copies_no_buffer_onto_itself_and_two_exchange_theirs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    alone = run_ranks(collectives, 1, tmp_path, folder, PolicySpec())
    pair = run_ranks(collectives, 2, tmp_path, folder, PolicySpec(layout=LayoutSpec(dp=2)))
    assert set(alone.values()) == {0}
    assert all(count > 0 for count in pair.values())
