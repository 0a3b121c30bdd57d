"""`Ptx`: the auxiliary pretraining loss of a step. Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155), eq. 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import Auxiliary, CrossEntropy
from nemo_rl_like.artifacts.hashing import JSON
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.order import DataPosition, position_of
from nemo_rl_like.spec.pretrain import PtxSpec
from nemo_rl_like.training.data_service import DataBatch

PTX = "ptx"
"""Name of the service, and before the metrics' names."""


@dataclass(slots=True)
class Ptx:
    """Packed rows of text, a batch for each optimizer step."""

    spec: PtxSpec
    workers: WorkerGroup
    """Hosts the service `ptx`, a `PretrainService`."""
    _position: DataPosition = field(init=False)

    def __post_init__(self) -> None:
        self._position = cast(DataPosition, self.workers.call(PTX, "start", what="start of the text"))

    def next(self) -> tuple[ray.ObjectRef, Auxiliary]:
        """The next batch with what is minimised on it."""
        rows = self.spec.rows_per_step
        got = cast(DataBatch, self.workers.call(PTX, "batch", self._position, rows, what="batch of text"))
        self._position = got.position
        return got.batch, Auxiliary(CrossEntropy(), self.spec.coef, PTX)

    def state(self) -> dict[str, JSON]:
        """Position in the text."""
        return asdict(self._position)

    def load_state(self, state: Mapping[str, JSON]) -> None:
        """Take back what `state` gave."""
        self._position = position_of(state)


def next_of(ptx: Ptx | None) -> tuple[ray.ObjectRef, Auxiliary] | None:
    """The next batch of text, where there is any."""
    return None if ptx is None else ptx.next()
