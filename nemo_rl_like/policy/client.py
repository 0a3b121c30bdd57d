"""`Policy`: the driver's handle on the ranks of a trainable model. Batches go in and come out as references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import ray

from nemo_rl_like.algorithms.objectives import Auxiliary, Objective
from nemo_rl_like.checkpoint.layout import ADAPTER, SECTIONS
from nemo_rl_like.cluster.client import Pending
from nemo_rl_like.cluster.context import Hosted
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.cluster.ray_session import RaySession
from nemo_rl_like.policy.gap import GapLimit
from nemo_rl_like.policy.top import TopK
from nemo_rl_like.spec.optimizer import OptimizerSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.tensors.shards import ShardFile
from nemo_rl_like.weights.network import Offer
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle

RANK = "nemo_rl_like.policy.rank:PolicyRank"
BASE = "nemo_rl_like.policy.base:BaseRank"
POLICY, CRITIC = "policy", "critic"
CRITIC_PREFIX, REFERENCE_PREFIX, AVERAGE_PREFIX = "critic-", "reference-", "average-"
"""Before the names of these models' folders in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy hosted as `service` in a worker group with axes pp, dp, cp, tp."""

    group: WorkerGroup
    service: str = POLICY
    adapted: bool = False
    """Whether adapters alone are trained."""
    virtual_tokens: int = 0
    """Places of the context that are taken before each row."""
    replays: bool = False
    """Whether training sends tokens to experts that were recorded (`policy.router.replay`)."""

    @classmethod
    def start(
        cls,
        session: RaySession,
        spec: PolicySpec,
        folder: Path,
        dtype: str,
        initialize: int | None = None,
        *,
        name: str = POLICY,
        score_head: bool = False,
        score_head_seed: int | None = None,
        adapter_seed: int | None = None,
        on_host: bool = False,
    ) -> Policy:
        """Start the ranks of a group `name` and build the model of the Hugging Face `folder` on them.

        `initialize`: seed of a model from scratch; the folder then needs no weights. `score_head`: a critic or reward model, see `host`.
        `adapter_seed`: of the new adapters of `spec.lora` or `spec.adapter`, which alone are trained; None: the whole model, whatever the spec says.
        `on_host`: see `host`.
        """
        adapted = adapter_seed is not None and spec.adapted
        virtual = spec.virtual_tokens if adapted else 0
        replays = spec.router.replay != "none" and not score_head
        policy = cls(cls.start_ranks(session, spec, name), name, adapted, virtual, replays)
        policy.host(
            folder,
            spec,
            dtype,
            initialize,
            score_head=score_head,
            score_head_seed=score_head_seed,
            adapter_seed=adapter_seed,
            on_host=on_host,
        )
        return policy

    @staticmethod
    def start_ranks(session: RaySession, spec: PolicySpec, name: str = POLICY) -> WorkerGroup:
        """Start the ranks alone, for models to be hosted on."""
        layout = spec.layout
        axes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
        return WorkerGroup.start(name, session=session, axes=axes, threads=spec.threads_per_rank, role="train")

    def host(
        self,
        folder: Path,
        spec: PolicySpec,
        dtype: str,
        initialize: int | None = None,
        *,
        score_head: bool = False,
        score_head_seed: int | None = None,
        adapter_seed: int | None = None,
        on_host: bool = False,
    ) -> None:
        """Build the model on the group's ranks under this handle's service name.

        `score_head`: a critic or reward model; where the folder has no head it is zeros, or drawn with `score_head_seed`. `on_host`: its weights
        lie in host memory but for passes, and it is not trained.
        """
        kwargs = {
            "folder": str(folder),
            "policy": spec,
            "dtype": dtype,
            "initialize": initialize,
            "score_head": score_head,
            "score_head_seed": score_head_seed,
            "adapter_seed": adapter_seed,
            "on_host": on_host,
            "timeout_s": self.group.session.spec.step_timeout_s,
        }
        self.group.host(self.service, RANK, kwargs)

    def base(self, service: str) -> Policy:
        """The model that the adapters started from, hosted as `service`: this policy without them, so it takes no memory."""
        self.group.host(service, BASE, {"policy": Hosted(self.service)})
        return Policy(self.group, service)

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
        auxiliary: tuple[ray.ObjectRef, Auxiliary] | None = None,
    ) -> dict[str, float]:
        """One optimizer step; see `PolicyRank.train_step`."""
        further = () if auxiliary is None else (auxiliary,)
        got = self.group.call(self.service, "train_step", batch, rows, objective, temperature, gap, *further, what=what)
        return cast(dict[str, float], got)

    def logprobs(
        self, batch: ray.ObjectRef, temperature: float, gap: GapLimit | None = None, what: str = "log-probs"
    ) -> tuple[ray.ObjectRef, dict[str, float]]:
        """Reference to the log-probs float32 [N] of the batch's trained tokens, and the gap metrics."""
        got = self.group.call(self.service, "logprobs", batch, temperature, gap, what=what)
        return cast(tuple[ray.ObjectRef, dict[str, float]], got)

    def logprobs_and_routes(
        self, batch: ray.ObjectRef, temperature: float, gap: GapLimit | None = None, what: str = "log-probs"
    ) -> tuple[ray.ObjectRef, ray.ObjectRef, dict[str, float]]:
        """As `logprobs`, and between them a reference to the experts of each token; see `PolicyRank.logprobs_and_routes`."""
        got = self.group.call(self.service, "logprobs_and_routes", batch, temperature, gap, what=what)
        return cast(tuple[ray.ObjectRef, ray.ObjectRef, dict[str, float]], got)

    def values(self, batch: ray.ObjectRef, what: str = "values") -> ray.ObjectRef:
        """Reference to the score head's numbers float32 [N] at the places that predict the batch's trained tokens."""
        return cast(ray.ObjectRef, self.group.call(self.service, "values", batch, what=what))

    def top_logprobs(
        self, batch: ray.ObjectRef, asked: TopK, what: str = "teacher's log-probs"
    ) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """References to ids int32 [N, K] and log-probs float32 [N, K]; see `PolicyRank.top_logprobs`."""
        got = self.group.call(self.service, "top_logprobs", batch, asked, what=what)
        return cast(tuple[ray.ObjectRef, ray.ObjectRef], got)

    def loss(
        self, batch: ray.ObjectRef, objective: Objective, what: str = "validation", temperature: float = 1.0
    ) -> dict[str, float]:
        """Metrics of the objective without a step."""
        got = self.group.call(self.service, "evaluate_loss", batch, objective, temperature, what=what)
        return cast(dict[str, float], got)

    def score(self, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Log-probs at temperature 1 of each row's tokens but the first."""
        return cast(list[list[float]], self.group.call(self.service, "score", rows, what="probe log-probs"))

    def publish(self, version: int) -> SharedMemoryHandle:
        """Put the weights where an engine can read them."""
        got = self.group.call(self.service, "publish", version, what=f"publishing weights of version {version}")
        return cast(SharedMemoryHandle, got)

    def offer(self, handle: SharedMemoryHandle) -> Offer:
        """Serve what `publish` holds to other hosts, until `withdraw` or the next `publish`."""
        what = f"offering weights of version {handle.manifest.version}"
        return cast(Offer, self.group.call(self.service, "offer", handle, what=what))

    def withdraw(self) -> None:
        """Give back the memory that `publish` holds, and end its offer."""
        self.group.call(self.service, "withdraw", what="withdrawing weights")

    def save(self, folder: Path, prefix: str = "") -> tuple[ShardFile, ...]:
        """Write weights (a Hugging Face folder) and, in training, optimizer state under a checkpoint's temporary folder."""
        return self._shards(self.group.submit(self.service, "save", str(folder), prefix, what=f"save to {folder}"))

    def begin_save(self, folder: Path, prefix: str = "") -> PendingSave:
        """As `save`, but returns when the ranks have copied what they will write."""
        self.group.call(self.service, "begin_save", str(folder), prefix, what=f"copy for the save to {folder}")
        return PendingSave(self, self.group.submit(self.service, "saved", what=f"save to {folder}"))

    def _shards(self, pending: Pending) -> tuple[ShardFile, ...]:
        """What every rank wrote."""
        parts = cast(list[tuple[ShardFile, ...]], self.group.results(pending))
        return tuple(shard for part in parts for shard in part)

    def load(self, folder: Path, updates: int | None = None, prefix: str = "") -> None:
        """Load weights from a checkpoint; with `updates`, also the optimizer state after that many steps."""
        self.group.call(self.service, "load", str(folder), updates, prefix, what=f"load of {folder}")


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A model whose ranks are writing copies of it."""

    model: Policy
    pending: Pending

    @property
    def ended(self) -> bool:
        """Whether every rank has ended, well or not."""
        return self.pending.ended()

    def shards(self) -> tuple[ShardFile, ...]:
        """Wait for the ranks; what they wrote. Raises DiskFull, or as `WorkerGroup.wait`."""
        return self.model._shards(self.pending)


@dataclass(frozen=True, slots=True)
class TrainedModels:
    """The models that change in a stage, and that its checkpoints hold."""

    policy: Policy
    critic: Policy | None = None
    reference: Policy | None = None
    """A reference that moves; None: it stays as it was, and is found where the stage started from."""
    average: Policy | None = None
    """The moving average of the policy's weights."""

    @property
    def sections(self) -> tuple[str, ...]:
        """Folders of a checkpoint that hold shards."""
        critic = tuple(f"{CRITIC_PREFIX}{name}" for name in SECTIONS) if self.critic is not None else ()
        reference = (f"{REFERENCE_PREFIX}weights",) if self.reference is not None else ()
        average = (f"{AVERAGE_PREFIX}weights",) if self.average is not None else ()
        adapter = (ADAPTER,) if self.policy.adapted else ()
        return (*SECTIONS, *adapter, *critic, *reference, *average)

    def save(self, folder: Path) -> tuple[ShardFile, ...]:
        """Write every model under a checkpoint's temporary folder."""
        parts = [model.save(folder, prefix) for model, prefix in self._by_prefix()]
        return tuple(shard for part in parts for shard in part)

    def begin_save(self, folder: Path) -> tuple[PendingSave, ...]:
        """As `save`, but returns when every model is copied."""
        return tuple(model.begin_save(folder, prefix) for model, prefix in self._by_prefix())

    def _by_prefix(self) -> list[tuple[Policy, str]]:
        """The models, with what stands before the names of their folders in a checkpoint."""
        given = (
            (self.policy, ""),
            (self.critic, CRITIC_PREFIX),
            (self.reference, REFERENCE_PREFIX),
            (self.average, AVERAGE_PREFIX),
        )
        return [(model, prefix) for model, prefix in given if model is not None]

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        """Load every model and its optimizer state; `updates`: optimizer steps made, by model."""
        self.policy.load(folder, updates[POLICY])
        if self.critic is not None:
            self.critic.load(folder, updates[CRITIC], CRITIC_PREFIX)
        if self.reference is not None:
            self.reference.load(folder, prefix=REFERENCE_PREFIX)
        if self.average is not None:
            self.average.load(folder, prefix=AVERAGE_PREFIX)
