"""What one stage has otherwise than its experiment, so that a teacher and its student, or a policy and its judge, stand in one pipeline."""

from __future__ import annotations

from nemo_rl_like.spec.base import Spec
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.environment import EnvironmentSpec
from nemo_rl_like.spec.extends import merge
from nemo_rl_like.spec.model import ModelSpec
from nemo_rl_like.spec.policy import PolicySpec
from nemo_rl_like.spec.source import Node, child

KEY = "settings"
_WHOLE = ("model", "environment")
"""Blocks that replace the experiment's: lines of another model or environment mean nothing to this one."""


class StageSettings(Spec):
    """Blocks in place of the experiment's, for one stage."""

    model: ModelSpec | None = None
    """Another model, given whole; the stage then starts from it, or from a stage before it that has the same."""
    policy: PolicySpec | None = None
    """Lines over the experiment's `policy`."""
    engine: EngineSpec | None = None
    """Lines over the experiment's `engine`."""
    environment: EnvironmentSpec | None = None
    """Another environment, given whole."""


def with_settings(root: Node) -> Node:
    """The spec with the experiment's blocks under those of each stage's `settings`, key by key."""
    stages = child(root, "stages")
    if stages is None or not isinstance(stages.value, list) or not isinstance(root.value, dict):
        return root
    items = [_with_settings(stage, root) for stage in stages.value]
    return Node({**root.value, "stages": Node(items, stages.where)}, root.where)


def _with_settings(stage: Node, root: Node) -> Node:
    settings = child(stage, KEY)
    if settings is None or not isinstance(settings.value, dict) or not isinstance(stage.value, dict):
        return stage
    merged = {name: _over(root, name, block) for name, block in settings.value.items()}
    return Node({**stage.value, KEY: Node(merged, settings.where)}, stage.where)


def _over(root: Node, name: str, block: Node) -> Node:
    under = child(root, name)
    if under is None or name in _WHOLE or not isinstance(block.value, dict):
        return block
    return merge(under, block)
