"""Named algorithms: a few lines of an algorithm block each, which a spec takes with `preset:` and overrides key by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nemo_rl_like.spec.extends import merge
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.source import Node, child
from nemo_rl_like.spec.yaml_reader import read_yaml_file

FOLDER = Path(__file__).parent / "presets"
BLOCK = "algorithm"
KEY = "preset"


@dataclass(frozen=True, slots=True)
class Preset:
    """One named algorithm."""

    name: str
    family: str
    """What it belongs to, in a word."""
    summary: str
    """What it does, in a line."""
    paper: str
    """Authors, year, place."""
    lines: str
    """The YAML of its block, as written."""
    block: Node
    """The same lines, parsed."""


@cache
def presets() -> Mapping[str, Preset]:
    """Every preset by name."""
    return {file.stem: _read(file) for file in sorted(FOLDER.glob("*.yaml"))}


def with_presets(root: Node, written_out: Callable[[Node], Node]) -> Node:
    """The spec with the lines of each stage's preset under those of the stage's own `algorithm` block.

    `written_out` turns short choices into blocks. Raises SpecProblems for a preset that does not exist.
    """
    stages = child(root, "stages")
    if stages is None or not isinstance(stages.value, list) or not isinstance(root.value, dict):
        return root
    items = [_with_preset(stage) for stage in stages.value]
    return written_out(Node({**root.value, "stages": Node(items, stages.where)}, root.where))


def _with_preset(stage: Node) -> Node:
    block = child(stage, BLOCK)
    if block is None or not isinstance(stage.value, dict):
        return stage
    name = child(block, KEY)
    if name is None or name.value is None:
        return stage
    found = presets().get(str(name.value))
    if found is None:
        known = ", ".join(presets())
        message = f"there is no preset {name.value!r}"
        raise SpecProblems(
            [SpecProblem(name.where, f"{BLOCK}.{KEY}", message, nearest(str(name.value), presets()), f"one of {known}")]
        )
    return Node({**stage.value, BLOCK: merge(found.block, block)}, stage.where)


def _read(file: Path) -> Preset:
    node = read_yaml_file(file)
    texts = {key: _line(node, key) for key in ("family", "summary", "paper")}
    block = child(node, BLOCK) or Node({}, node.where)
    lines = file.read_text(encoding="utf-8").partition(f"{BLOCK}:")[2]
    return Preset(name=file.stem, lines=f"{BLOCK}:{lines}", block=block, **texts)


def _line(node: Node, key: str) -> str:
    found = child(node, key)
    if found is None or not isinstance(found.value, str):
        raise SpecProblems([SpecProblem(node.where, key, "a preset names its family, summary and paper")])
    return found.value
