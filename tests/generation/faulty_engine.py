"""A vLLM replica in a worker group that does one thing wrong on request, and counts what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.types import Completion, Request, Sampling, SyncReport
from nemo_rl_like.generation.vllm import VllmEngine
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.model import DType
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle

from .tiny_models import Q


class FaultyEngine(VllmEngine):
    """The product's engine with planted faults in its worker, or in what it reports."""

    def __init__(
        self,
        context: RankContext,
        *,
        model_folder: str,
        dtype: DType,
        engine: EngineSpec,
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 3600.0,
    ) -> None:
        super().__init__(
            context,
            model_folder=model_folder,
            dtype=dtype,
            engine=engine,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
            worker_extension=f"{__package__}.faulty_worker.FaultyWorker",
        )
        self._fault = ""
        self._asked: list[str] = []

    def plant(self, fault: str, worker: int | None = None) -> None:
        """Do `fault` from now on: one of vLLM's workers' (of all, or of one), or `false_report`."""
        self._fault = fault
        self._loop.run(self._llm.collective_rpc("plant", args=(fault, worker)), 30, "planting a fault")

    def asked(self) -> list[str]:
        """Ids of the requests since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self._asked += [request.request_id for request in requests]
        return super().generate(requests, sampling)

    def update_weights(self, version: int, handle: SharedMemoryHandle | None) -> SyncReport:
        report = super().update_weights(version, handle)
        if self._fault == "false_report":
            return replace(report, checksums={**report.checksums, Q: "0" * 64})
        return report
