"""`Policy`: the driver's handle on the ranks of a trainable model. Batches go in and come out as references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import Objective
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.policy.gap import GapLimit
from nemo_rl_like.spec.experiment import OptimizerSpec, PolicySpec
from nemo_rl_like.tensors.shards import ShardFile
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle

RANK = "nemo_rl_like.policy.rank:PolicyRank"


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy hosted as `service` in a worker group with axes dp, pp, tp."""

    group: WorkerGroup
    service: str = "policy"

    @classmethod
    def start(
        cls, session: RaySession, spec: PolicySpec, folder: Path, dtype: str, initialize: int | None = None
    ) -> Policy:
        """Start the ranks and build the model of the Hugging Face `folder` on them.

        `initialize`: seed of a model from scratch; the folder then needs no weights.
        """
        layout = spec.layout
        axes = {"dp": layout.dp, "pp": layout.pp, "tp": layout.tp}
        group = WorkerGroup.start("policy", session=session, axes=axes, threads=spec.threads_per_rank)
        policy = cls(group)
        policy.host(folder, spec, dtype, initialize)
        return policy

    def host(self, folder: Path, spec: PolicySpec, dtype: str, initialize: int | None = None) -> None:
        """Build the model on the group's ranks under this handle's service name."""
        kwargs = {
            "folder": str(folder),
            "policy": spec,
            "dtype": dtype,
            "initialize": initialize,
            "timeout_s": self.group.session.spec.step_timeout_s,
        }
        self.group.host(self.service, RANK, kwargs)

    def start_training(self, optimizer: OptimizerSpec, total_updates: int) -> None:
        """Make the optimizer; its schedule spans `total_updates` steps."""
        self.group.call(self.service, "start_training", optimizer, total_updates, what="start of training")

    def train_step(
        self,
        batch: ray.ObjectRef,
        rows: Sequence[int] | None,
        objective: Objective,
        temperature: float = 1.0,
        gap: GapLimit | None = None,
        what: str = "update",
    ) -> dict[str, float]:
        """One optimizer step; see `PolicyRank.train_step`."""
        got = self.group.call(self.service, "train_step", batch, rows, objective, temperature, gap, what=what)
        return cast(dict[str, float], got)

    def logprobs(
        self, batch: ray.ObjectRef, temperature: float, gap: GapLimit | None = None, what: str = "log-probs"
    ) -> tuple[ray.ObjectRef, dict[str, float]]:
        """Reference to the log-probs float32 [N] of the batch's trained tokens, and the gap metrics."""
        got = self.group.call(self.service, "logprobs", batch, temperature, gap, what=what)
        return cast(tuple[ray.ObjectRef, dict[str, float]], got)

    def loss(self, batch: ray.ObjectRef, objective: Objective, what: str = "validation") -> dict[str, float]:
        """Metrics of the objective without a step."""
        return cast(dict[str, float], self.group.call(self.service, "evaluate_loss", batch, objective, what=what))

    def score(self, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Log-probs at temperature 1 of each row's tokens but the first."""
        return cast(list[list[float]], self.group.call(self.service, "score", rows, what="probe log-probs"))

    def publish(self, version: int) -> SharedMemoryHandle:
        """Put the weights where an engine can read them."""
        got = self.group.call(self.service, "publish", version, what=f"publishing weights of version {version}")
        return cast(SharedMemoryHandle, got)

    def withdraw(self) -> None:
        """Give back the memory that `publish` holds."""
        self.group.call(self.service, "withdraw", what="withdrawing weights")

    def save(self, folder: Path) -> tuple[ShardFile, ...]:
        """Write weights (a Hugging Face folder) and, in training, optimizer state under a checkpoint's temporary folder."""
        return cast(tuple[ShardFile, ...], self.group.call(self.service, "save", str(folder), what=f"save to {folder}"))

    def load(self, folder: Path, updates: int | None = None) -> None:
        """Load weights from a checkpoint; with `updates`, also the optimizer state after that many steps."""
        self.group.call(self.service, "load", str(folder), updates, what=f"load of {folder}")
