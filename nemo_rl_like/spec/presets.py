"""Named algorithms: a few lines each of an `rl` stage's algorithm block or of another stage, which a spec takes with `preset:` and
overrides key by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

from nemo_rl_like.spec.extends import merge
from nemo_rl_like.spec.nearest import nearest
from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.source import Node, child
from nemo_rl_like.spec.yaml_reader import read_yaml_file

FOLDER = Path(__file__).parent / "presets"
KEY = "preset"
ALGORITHM = "algorithm"
"""The block of an `rl` stage that a preset fills; those of other stages fill the stage itself."""
_RL = "rl"


@dataclass(frozen=True, slots=True)
class Preset:
    """One named algorithm."""

    name: str
    stage: str
    """Kind of the stages that take it."""
    family: str
    """What it belongs to, in a word."""
    summary: str
    """What it does, in a line."""
    paper: str
    """Authors, year, place."""
    lines: str
    """The YAML that it stands for, as written."""
    block: Node
    """The same lines, parsed: an `algorithm` block, or keys of the stage."""


def presets(stage: str | None = None) -> Mapping[str, Preset]:
    """Every preset by name, or those that stages of one kind take."""
    return {name: preset for name, preset in _every().items() if stage in (None, preset.stage)}


@cache
def _every() -> Mapping[str, Preset]:
    return {file.stem: _read(file) for file in sorted(FOLDER.glob("*.yaml"))}


def with_presets(root: Node, written_out: Callable[[Node], Node]) -> Node:
    """The spec with the lines of each stage's preset under the stage's own.

    `written_out` turns short choices into blocks. Raises SpecProblems for a preset that does not exist.
    """
    stages = child(root, "stages")
    if stages is None or not isinstance(stages.value, list) or not isinstance(root.value, dict):
        return root
    items = [_with_preset(stage, written_out) for stage in stages.value]
    return written_out(Node({**root.value, "stages": Node(items, stages.where)}, root.where))


def _with_preset(stage: Node, written_out: Callable[[Node], Node]) -> Node:
    kind = child(stage, "kind")
    if not isinstance(stage.value, dict) or kind is None:
        return stage
    if kind.value != _RL:
        found = _chosen(stage, str(kind.value), KEY)
        return stage if found is None else merge(_as_stage(found, kind, written_out), stage)
    block = child(stage, ALGORITHM)
    found = None if block is None else _chosen(block, _RL, f"{ALGORITHM}.{KEY}")
    if block is None or found is None:
        return stage
    return Node({**stage.value, ALGORITHM: merge(found.block, block)}, stage.where)


def _as_stage(preset: Preset, kind: Node, written_out: Callable[[Node], Node]) -> Node:
    """The preset's lines as a stage of `kind`, short choices written out, so that a stage's own blocks merge with them."""
    stage = Node({"kind": kind, **dict(_items(preset.block))}, preset.block.where)
    stages = child(written_out(Node({"stages": Node([stage], stage.where)}, stage.where)), "stages")
    assert stages is not None and isinstance(stages.value, list)
    return stages.value[0]


def _chosen(block: Node, stage: str, path: str) -> Preset | None:
    """The preset that a block names, or None. Raises SpecProblems when stages of this kind have none of that name."""
    name = child(block, KEY)
    known = presets(stage)
    if name is None or name.value is None or not known:
        return None
    found = known.get(str(name.value))
    if found is None:
        elsewhere = presets().get(str(name.value))
        message = f"there is no preset {name.value!r}" + (
            f" for stages of kind {stage}, only for {elsewhere.stage}" if elsewhere is not None else ""
        )
        near = nearest(str(name.value), known)
        raise SpecProblems([SpecProblem(name.where, path, message, near, f"one of {', '.join(known)}")])
    return found


def _read(file: Path) -> Preset:
    node = read_yaml_file(file)
    texts = {key: _line(node, key) for key in ("family", "summary", "paper")}
    stage = child(node, "stage")
    key = ALGORITHM if stage is None else "lines"
    block = child(node, key) or Node({}, node.where)
    written = file.read_text(encoding="utf-8").partition(f"\n{key}:")[2]
    lines = f"{key}:{written}" if stage is None else dedent(written).lstrip("\n")
    return Preset(name=file.stem, stage=_RL if stage is None else str(stage.value), lines=lines, block=block, **texts)


def _items(node: Node) -> Mapping[str, Node]:
    return node.value if isinstance(node.value, dict) else {}


def _line(node: Node, key: str) -> str:
    found = child(node, key)
    if found is None or not isinstance(found.value, str):
        raise SpecProblems([SpecProblem(node.where, key, "a preset names its family, summary and paper")])
    return found.value
