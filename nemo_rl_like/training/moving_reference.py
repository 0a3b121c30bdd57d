"""A policy whose reference moves: what it takes to move it, and to find it again in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_like.artifacts.files import atomic_write, fsync_folder
from nemo_rl_like.cluster.context import Hosted
from nemo_rl_like.policy.client import Policy
from nemo_rl_like.tensors.shards import INDEX, ShardFile, index_json

FOLDER = "reference"
"""Folder inside a checkpoint: a Hugging Face folder `weights`, as the checkpoint's own."""
SERVICE = "mixer"
MIXER = "nemo_rl_like.policy.mixer:ReferenceMixer"


@dataclass(frozen=True, slots=True)
class MovingReference:
    """Saves and loads as a policy does, with the reference beside it."""

    policy: Policy
    reference: Policy

    @classmethod
    def start(cls, policy: Policy, reference: Policy) -> MovingReference:
        """Host what mixes the weights on the ranks of both."""
        models = {"policy": Hosted(policy.service, "model"), "reference": Hosted(reference.service, "model")}
        policy.group.host(SERVICE, MIXER, models)
        return cls(policy, reference)

    def move(self, alpha: float) -> None:
        """reference = alpha policy + (1 - alpha) reference."""
        self.policy.group.call(SERVICE, "mix", alpha, what="moving the reference")

    def save(self, folder: Path) -> tuple[ShardFile, ...]:
        """Write policy, optimizer and reference under a checkpoint's temporary folder."""
        shards = self.policy.save(folder)
        weights = folder / FOLDER / "weights"
        weights.mkdir(parents=True)
        mine = self.reference.save(folder / FOLDER)
        atomic_write(weights / INDEX, index_json(mine))
        for written in (weights, weights.parent):
            fsync_folder(written)
        return (*shards, *(replace(shard, path=f"{FOLDER}/{shard.path}") for shard in mine))

    def load(self, folder: Path, updates: int | None = None) -> None:
        """Take all three from a checkpoint."""
        self.policy.load(folder, updates)
        self.reference.load(folder / FOLDER)
