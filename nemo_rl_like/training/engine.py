"""The engine as a run sees it: started beside the policy, fed with its weights, proved to hold them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import ray

from nemo_rl_like.cluster.client import GroupClient
from nemo_rl_like.cluster.context import Hosted
from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.generation.probe import check_gap, probe_gap, probe_prompts
from nemo_rl_like.generation.types import Completion, Request, Sampling, SyncReport
from nemo_rl_like.model.outline import Outline
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.policy.gap import GapLimit
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.model import DType
from nemo_rl_like.spec.online import OpponentSpec
from nemo_rl_like.training.spread import spread
from nemo_rl_like.weights.errors import WeightSyncError, told_of
from nemo_rl_like.weights.manifest import Manifest, compare

logger = logging.getLogger(__name__)

SERVICE, OPPONENT = "engine", "opponent"
EMBEDDED = "nemo_rl_like.generation.embedded:EmbeddedEngine"
OPPONENT_ENGINE = "nemo_rl_like.generation.opponent:OpponentEngine"
VLLM = "nemo_rl_like.generation.vllm:VllmEngine"


@dataclass(frozen=True, slots=True)
class EngineClient:
    """Calls an engine from any worker: the `Generator` of rollouts. Replicas share the requests evenly, in order."""

    client: GroupClient
    replicas: int
    """1: the call is collective on every rank of the group."""
    deadline_s: float
    service: str = SERVICE

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One list per request with one completion per seed, in order."""
        if self.replicas == 1:
            got = self.client.call(self.service, "generate", list(requests), sampling, deadline_s=self.deadline_s)
            return cast(list[list[Completion]], got)
        shares = [list(range(i, len(requests), self.replicas)) for i in range(self.replicas)]
        pending = [
            self.client.submit(self.service, "generate", [requests[i] for i in share], sampling, ranks=[rank])
            for rank, share in enumerate(shares)
        ]
        out: list[list[Completion]] = [[] for _ in requests]
        for share, one in zip(shares, pending, strict=True):
            self.client.wait(one, deadline_s=self.deadline_s)
            for index, completions in zip(share, ray.get(one[0]), strict=True):
                out[index] = completions
        return out


@dataclass(slots=True)
class RunEngine:
    """The engine of a run, with the policy whose weights it samples from."""

    spec: EngineSpec
    policy: Policy
    group: WorkerGroup
    config: Outline
    owns_group: bool
    max_gap: float
    """Largest 99 % quantile of |engine - trainer| log-prob, in nats."""
    version: int = 0

    @classmethod
    def start(
        cls,
        spec: EngineSpec,
        policy: Policy,
        folder: Path,
        dtype: DType,
        config: Outline,
        *,
        record_routes: bool = False,
    ) -> RunEngine:
        """Start the engine: on the policy's own ranks (embedded), or as vLLM replicas that read `folder` first.

        `record_routes`: the embedded engine tells the experts of its tokens.
        """
        session = policy.group.session
        if spec.kind == "embedded":
            kwargs: dict[str, object] = {
                "model_handle": Hosted(policy.service, "model"),
                "engine": spec,
                "record_routes": record_routes,
            }
            policy.group.host(SERVICE, EMBEDDED, kwargs)
            return cls(spec, policy, policy.group, config, owns_group=False, max_gap=spec.gap_limit(dtype))
        gpu = session.devices.kind == "gpu"
        group = WorkerGroup.start(
            "engine",
            session=session,
            axes={"replica": spec.replicas},
            threads=spec.threads,
            devices=float(spec.tensor_parallel) if gpu else 0.0,
            spread=not gpu,
            role="generate",
        )
        kwargs = {
            "model_folder": str(folder),
            "dtype": dtype,
            "engine": spec,
            "start_timeout_s": session.spec.start_timeout_s,
            "call_timeout_s": session.spec.step_timeout_s,
        }
        group.host(SERVICE, VLLM, kwargs)
        return cls(spec, policy, group, config, owns_group=True, max_gap=spec.gap_limit(dtype))

    def client(self) -> EngineClient:
        """What the rollout worker calls."""
        replicas = 1 if self.spec.kind == "embedded" else self.spec.replicas
        return EngineClient(self.group.client(), replicas, self.group.session.spec.step_timeout_s)

    def gap_limit(self) -> GapLimit:
        """Limit on the gap of rollout tokens at the current version."""
        return GapLimit(self.max_gap, self.version)

    def sync(self, version: int) -> dict[str, float]:
        """Bring the policy's weights to the engine as `version` and prove it; returns metrics.

        vLLM: every replica's checksums and consumed names are compared with the manifest, then probe prompts are scored by
        engine and trainer. Embedded: it reads the trainer's own parameters, so only its version (and its caches) change.
        Raises WeightSyncError naming tensors or numbers.
        """
        what = f"weight sync of version {version}"
        if self.spec.kind == "embedded":
            self._everywhere("update_weights", version, None, what=what)
            self.version = version
            return {}
        with spread(self.policy, self.group, SERVICE, version) as places:
            calls = [
                self.group.submit(SERVICE, "update_weights", version, at.handle, ranks=at.ranks, what=what)
                for at in places
            ]
            for at, call in zip(places, calls, strict=True):
                for rank, report in zip(at.ranks, self.group.results(call), strict=True):
                    _require_held(version, at.handle.manifest, cast(SyncReport, report), rank)
        self.version = version
        return self.probe()

    def probe(self) -> dict[str, float]:
        """Score fixed prompts with engine and trainer. Raises WeightSyncError when they disagree by more than the limit."""
        places = self.config.max_positions - self.policy.virtual_tokens
        context = min(self.spec.max_context or places, places)
        tokens = min(self.spec.probe_tokens, context - 1)
        rows = probe_prompts(self.config.vocab_size, count=self.spec.probe_prompts, tokens=tokens)
        trainer = self.policy.score(rows)
        worst = {"probe/p99": 0.0, "probe/max": 0.0}
        for rank, engine in enumerate(self._everywhere("score", rows, what="probe prompts")):
            gap = probe_gap(cast(list[list[float]], engine), trainer)
            what = f"probe prompts at weight version {self.version}, engine rank {rank}"
            check_gap(gap, self.max_gap, what)
            worst = {"probe/p99": max(worst["probe/p99"], gap.p99), "probe/max": max(worst["probe/max"], gap.max)}
        return worst

    def _everywhere(self, method: str, *args: object, what: str) -> list[object]:
        """What each rank of the engine answers, so that no replica is taken on trust."""
        pending = self.group.submit(SERVICE, method, *args, what=what)
        self.group.wait(pending)
        return list(ray.get(list(pending.values)))

    def close(self) -> None:
        """End the engine's own workers."""
        if self.owns_group:
            self.group.shutdown()


def _require_held(version: int, manifest: Manifest, report: SyncReport, rank: int) -> None:
    """Raise WeightSyncError unless the replica says that it holds exactly what was sent."""
    with told_of(f"engine rank {rank}"):
        compare(manifest, report.checksums, report.consumed)
        if report.version != version:
            raise WeightSyncError(f"weight sync of version {version}: the engine says it holds {report.version}")


def host_opponent(spec: EngineSpec, policy: Policy, reference: Policy, opponent: OpponentSpec) -> EngineClient:
    """Host the opponent's engine beside policy and reference, whichever engine the policy has; what the rollout worker calls."""
    kwargs: dict[str, object] = {
        "reference_handle": Hosted(reference.service, "model"),
        "policy_handle": Hosted(policy.service, "model"),
        "engine": spec,
        "opponent": opponent,
    }
    policy.group.host(OPPONENT, OPPONENT_ENGINE, kwargs)
    return EngineClient(policy.group.client(), 1, policy.group.session.spec.step_timeout_s, OPPONENT)
