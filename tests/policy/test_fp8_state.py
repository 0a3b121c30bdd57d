"""FP8 scaling state goes into a checkpoint and comes back at any layout, layer by layer.

Transformer Engine is not installed on a CPU. `StandIn` keeps its contract: a module's extra state is a byte tensor that only the module
reads, empty before the first step, and equal on all ranks of a pipeline stage.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.policy.fp8_state import scaling_modules
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.policy.store import PolicyStore
from nemo_rl_like.spec.optimizer import SgdOptimizer
from nemo_rl_like.spec.policy import Fp8Spec, LayoutSpec, PolicySpec
from tests.model.tiny import make_model
from tests.policy.ranks import context_of, run_ranks, save_checkpoint

DELAYED = Fp8Spec(recipe="delayed", amax_history_len=4)
OTHERS = {
    "history": Fp8Spec(recipe="delayed", amax_history_len=8),
    "margin": Fp8Spec(recipe="delayed", amax_history_len=4, margin=1),
}
LAYOUTS = {
    "tp2": LayoutSpec(tp=2, sp=True),
    "dp2": LayoutSpec(dp=2),
    "pp2": LayoutSpec(pp=2),
    "vpp2": LayoutSpec(pp=2, vpp=2),
}


class StandIn(torch.nn.Module):
    """In the place of one of Transformer Engine's linear layers: its scaling state, and no product."""

    def __init__(self) -> None:
        super().__init__()
        self.history: Tensor | None = None

    def get_extra_state(self) -> Tensor:
        """uint8 [n]"""
        if self.history is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(self.history)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """The other way."""
        if state.numel():
            self.history = pickle.loads(state.numpy().tobytes())


def make(rank: int, world: int, port: int, folder: Path, layout: LayoutSpec, fp8: Fp8Spec | None) -> PolicyRank:
    """A rank in training, each of whose layers has a stand-in that has been used and one that has not."""
    place = context_of(layout, rank, world, port)
    made = PolicyRank(place, folder=str(folder), policy=PolicySpec(layout=layout), dtype="float32")
    made.start_training(SgdOptimizer(), 4)
    backend: Any = made.backend
    for layer in backend.model.layers:
        layer.self_attention.linear_qkv.scaling, layer.self_attention.unused = StandIn(), StandIn()
    backend.store = PolicyStore(backend.model, backend._config, folder, None, fp8)
    return made


def histories(member: PolicyRank) -> dict[str, Tensor | None]:
    """What this rank's stand-ins hold."""
    modules = scaling_modules(member.model)  # type: ignore[arg-type]
    return {name: module.history for name, module in modules.items() if isinstance(module, StandIn)}


def fill(member: PolicyRank) -> None:
    """As a few steps would: a history of each layer's own, equal on all ranks that hold it."""
    for name, module in scaling_modules(member.model).items():
        if name.endswith(".scaling"):
            draw = torch.Generator().manual_seed(int(name.split(".")[1]))
            module.history = torch.rand(4, 3, generator=draw)  # type: ignore[assignment]


def told(member: PolicyRank, path: Path) -> str:
    """The error that loading ends in."""
    try:
        member.load(str(path), 0)
    except InputError as error:
        return str(error)
    return ""


def everything(rank: int, world: int, port: int, folder: Path, root: Path) -> dict[str, Any]:
    """Saved at one layout and loaded at each; what is refused."""
    first = make(rank, world, port, folder, LAYOUTS["pp2"], DELAYED)
    fill(first)
    saved = save_checkpoint(first, root / "delayed", 1)
    plain = save_checkpoint(make(rank, world, port, folder, LAYOUTS["dp2"], None), root / "plain", 1)
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        member = make(rank, world, port, folder, layout, DELAYED)
        member.load(str(saved), 0)
        got = histories(member)
        fill(member)
        want = histories(member)
        parts: list[Any] = [None] * world
        torch.distributed.all_gather_object(parts, [(got, want)])
        found[name] = [pair for part in parts for pair in part]
    at = LAYOUTS["dp2"]
    found["refused"] = {name: told(make(rank, world, port, folder, at, fp8), saved) for name, fp8 in OTHERS.items()}
    member = make(rank, world, port, folder, at, DELAYED)
    member.load(str(plain), 0)
    found["plain"] = histories(member)
    experts = LayoutSpec(dp=2, ep=2)
    found["refused"]["experts"] = told(make(rank, world, port, folder, experts, DELAYED), saved)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found."""
    folder = tmp_path_factory.mktemp("mixture")
    make_model("qwen3_moe").save_pretrained(folder)
    root, where = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("ranks")
    made: dict[str, Any] = run_ranks(everything, 2, where, folder, root)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_of_a_layout_gets_its_layers_state(found: dict[str, Any], layout: str) -> None:
    layers = set()
    for got, want in found[layout]:
        assert got.keys() == want.keys()
        for name, history in want.items():
            assert (history is None) == name.endswith(".unused")
            assert got[name] is None if history is None else torch.equal(got[name], history), name
            layers.add(name.split(".")[1])
    assert layers == {"0", "1", "2", "3"}


def test_a_checkpoint_of_another_recipe_starts_the_histories_anew(found: dict[str, Any]) -> None:
    assert all(history is None for history in found["plain"].values())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("history", "policy.fp8.amax_history_len 4, which is 8 here; set it to 4"),
        ("margin", "policy.fp8.margin 0, which is 1 here; set it to 0"),
        ("experts", "experts of a rank 4, which is 2 here; keep `policy.layout.ep`"),
    ],
)
def test_state_that_was_made_with_other_settings_is_refused_by_name(
    found: dict[str, Any], case: str, words: str
) -> None:
    assert words in found["refused"][case]
