"""`extends:`: a spec file that starts from one or several others."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath

from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.source import Node, Position, child, item_names, list_index
from nemo_rl_like.spec.yaml_reader import read_yaml_file

KEY = "extends"


def read_with_parents(path: FilePath, written_out: Callable[[Node], Node]) -> Node:
    """The file's content over that of its parents, without the `extends` key.

    Parents are relative to the file that names them; a later one wins over an earlier, the file over all. Mappings are
    merged key by key; a mapping over a list changes the items that its keys name; other lists and scalars replace.

    Args:
        path: the file.
        written_out: turns a file's short choices into blocks, so that blocks of two files can be merged.

    Raises:
        SpecProblems: a file is missing or bad, or the chain of parents is a circle.
    """
    return _read(path, (), Position(str(path)), written_out)


def _read(path: FilePath, chain: tuple[FilePath, ...], named_at: Position, written_out: Callable[[Node], Node]) -> Node:
    real = path.resolve()
    if real in chain:
        circle = " -> ".join(str(p) for p in (*chain[chain.index(real) :], real))
        raise SpecProblems(
            [SpecProblem(named_at, KEY, f"the files extend each other in a circle: {circle}; remove one link")]
        )
    if not path.is_file():
        raise SpecProblems([_missing(path, named_at, KEY if chain else "")])
    node = read_yaml_file(path)
    if not isinstance(node.value, dict):
        raise SpecProblems([SpecProblem(node.where, "", "a spec is a mapping of keys to values")])
    own = written_out(Node({k: v for k, v in node.value.items() if k != KEY}, node.where))
    base: Node | None = None
    for name, where in _parents(node):
        parent = _read(path.parent / name, (*chain, real), where, written_out)
        base = parent if base is None else merge(base, parent)
    return own if base is None else merge(base, own)


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings key by key, a mapping over a list item by item, anything else replaced.

    A block of another `kind` replaces the whole block: numbers of one kind mean nothing to another.
    """
    if isinstance(base.value, list) and isinstance(over.value, dict):
        return _merge_items(base, base.value, over.value)
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)) or _other_kind(base, over):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, over.where)


def _merge_items(base: Node, items: Sequence[Node], over: Mapping[str, Node]) -> Node:
    merged = list(items)
    for key, node in over.items():
        index = list_index(items, key)
        if index is None:
            allowed = f"{', '.join(item_names(items))}, or an index 0 to {len(items) - 1}"
            raise SpecProblems(
                [SpecProblem(node.where, key, f"no single list item is called `{key}`", allowed=allowed)]
            )
        merged[index] = merge(merged[index], node)
    return Node(merged, base.where)


def _other_kind(base: Node, over: Node) -> bool:
    kinds = [found.value if found is not None else None for found in (child(base, "kind"), child(over, "kind"))]
    return None not in kinds and kinds[0] != kinds[1]


def _parents(node: Node) -> list[tuple[str, Position]]:
    """Names of the parents with the places that name them."""
    given = child(node, KEY)
    if given is None:
        return []
    entries = given.value if isinstance(given.value, list) else [given]
    names: list[tuple[str, Position]] = []
    for entry in entries:
        if not isinstance(entry.value, str) or not entry.value:
            message = f"is {entry.value!r}, must be a file name or a list of file names, relative to this file"
            raise SpecProblems([SpecProblem(entry.where, KEY, message)])
        names.append((entry.value, entry.where))
    return names


def _missing(path: FilePath, where: Position, key: str) -> SpecProblem:
    """A file that is not there, with the nearest one that is."""
    if path.is_dir():
        return SpecProblem(where, key, f"{path} is a folder; give the YAML file in it")
    if os.path.lexists(path):
        return SpecProblem(
            where, key, f"{path} is no file that can be read: a link to nothing, or a device; give the YAML file"
        )
    siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return SpecProblem(where, key, f"there is no file {path}", str(path.parent / near[0]) if near else None)
