"""What the engine and its vLLM workers say to each other: a load format, and the report of a weight update."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MERGED_FORMAT = "nrl_merged"
"""vLLM's `load_format` for a folder whose weights are merged as they are read; see `vllm_loader`."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker's account of a weight update."""

    checksums: dict[str, str]
    """sha256 of the bytes this worker read, by Hugging Face name."""
    consumed: list[str]
    """Names whose tensors reached a parameter of this worker's model."""
    error: str | None
    """Why nothing was loaded; None if the weights were loaded."""

    def to_json(self) -> str:
        """Text form, for vLLM's calls between processes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerReport:
        """Undo `to_json`."""
        return cls(**json.loads(text))
