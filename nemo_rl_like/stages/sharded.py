"""Whether `policy.backend: fsdp` can train a folder's model: asked of transformers, without weights in memory."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.model.hf_io import TensorReader
from nemo_rl_like.model.transformers_model import empty_model
from nemo_rl_like.spec.policy import PolicySpec


def check_sharded(policy: PolicySpec, folder: Path, weights: TensorReader) -> None:
    """transformers has the architecture, finds its tensors in `weights`, and takes the policy's rows. Raises InputError, SpecError."""
    model = empty_model(folder)
    model.check(weights)
    if policy.rows == "shared_prefix" and model.windowed:
        raise SpecError(
            f"`policy.rows` is shared_prefix, and {type(model.hf).__name__} has layers that attend within a window, which its mask would widen; "
            "set `policy.rows: packed`"
        )


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the folder's model, by Hugging Face name."""
    return {name: tuple(parameter.shape) for name, parameter in empty_model(folder).trained().items()}
