"""What the embedded engine and the trainer say behind virtual tokens, beside PEFT's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.generation.embedded import EmbeddedEngine
from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.policy import PolicySpec
from tests.policy.ranks import context_of
from tests.policy.test_lora_laws import Folders, member, steps

Found = tuple[list[dict[str, Any]], dict[str, Any]]
ROWS = [tuple((7 * i + 3 * j) % 97 for j in range(4 + 3 * i)) for i in range(4)]


def one_rank(rank: int, world: int, port: int, folders: Folders, policies: list[PolicySpec]) -> Found:
    """What `steps` finds with each policy, and `sampled` with the first."""
    return steps(rank, world, port, folders, policies), sampled(rank, world, port, folders, policies[0])


def sampled(rank: int, world: int, port: int, folders: Folders, policy: PolicySpec) -> dict[str, Any]:
    """What the embedded engine makes of rows and prompts, and what the trainer says of the former."""
    this = member(rank, world, port, folders, policy)
    this.load(str(folders.checkpoint), None)
    assert isinstance(this.model, MegatronModel)
    place = context_of(policy.layout, rank, world, port)
    engine = EmbeddedEngine(place, model_handle=this.model, engine=EngineSpec())
    asked = [Request(f"r{i}", row, (i, i + 10)) for i, row in enumerate(ROWS)]
    samples = engine.generate(asked, Sampling(max_new_tokens=5, ignore_stop=True))
    longest = this.model.shape.max_positions - policy.virtual_tokens
    with pytest.raises(InputError, match=f"no room in the context of {longest}"):
        engine.generate([Request("long", (1,) * longest, (1,))], Sampling(max_new_tokens=1))
    return {"engine": engine.score(ROWS), "trainer": this.score(ROWS), "samples": samples}


def check_samples(got: dict[str, Any], model: nn.Module) -> None:
    """All of it is what `model` says."""

    def said(row: tuple[int, ...]) -> list[float]:
        ids = torch.tensor(row)
        table = model(ids[None]).logits[0, :-1].detach().log_softmax(-1)
        found: list[float] = table.gather(1, ids[1:, None])[:, 0].tolist()
        return found

    for row, engine, trainer, samples in zip(ROWS, got["engine"], got["trainer"], got["samples"], strict=True):
        assert engine == pytest.approx(said(row), abs=1e-5) and trainer == pytest.approx(said(row), abs=1e-5)
        for one in samples:
            assert list(one.logprobs) == pytest.approx(said((*row, *one.ids))[len(row) - 1 :], abs=1e-5)
