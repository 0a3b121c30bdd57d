"""`${path.to.key}` and `${env:NAME}` inside spec values; `$${` stands for a plain `${`."""

from __future__ import annotations

import os
import re

from nemo_rl_like.spec.problems import SpecProblem, SpecProblems
from nemo_rl_like.spec.source import Node, Path, child, dotted, list_index
from nemo_rl_like.spec.yaml_reader import MAX_DEPTH, MAX_NODES

ENV_ALLOWED = (
    "output",
    "model.path",
    "model.adapter",
    "model.tokenizer.path",
    "policy.lora.path",
    "cluster.address",
    "environment.reward",
    "environment.prompts",
    "stages.*.data.path",
)
"""Paths at which `${env:NAME}` may stand: folders, files and addresses, which differ between machines."""

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE)", re.IGNORECASE)


def interpolate(root: Node) -> Node:
    """`root` with every reference replaced. A value that is one reference takes its target's type; inside longer text the
    target must be a scalar.

    Raises:
        SpecProblems: references to nothing, circles, environment variables that are unset, secret or not allowed there.
    """
    resolver = _Resolver(root)
    resolved = resolver.walk(root, (), ())
    if resolver.problems:
        raise SpecProblems(resolver.problems)
    return resolved


def escape(text: str) -> str:
    """Text that interpolation turns back into `text`."""
    return text.replace("${", "$${")


class _Resolver:
    def __init__(self, root: Node) -> None:
        self.root = root
        self.problems: list[SpecProblem] = []
        self.count = 0

    def walk(self, node: Node, path: Path, open_references: tuple[str, ...]) -> Node:
        """`node`, which stands at `path`, resolved; `open_references` are the references being followed."""
        self.count += 1
        if self.count > MAX_NODES:
            message = f"references expand to more than {MAX_NODES} values; write them out or shorten the file"
            raise SpecProblems([SpecProblem(node.where, dotted(self.root, path), message)])
        if isinstance(node.value, dict):
            return Node({k: self.walk(v, (*path, k), open_references) for k, v in node.value.items()}, node.where)
        if isinstance(node.value, str):
            return self.text(node, node.value, path, open_references)
        if isinstance(node.value, list):
            return Node([self.walk(v, (*path, i), open_references) for i, v in enumerate(node.value)], node.where)
        return node

    def text(self, node: Node, text: str, path: Path, open_references: tuple[str, ...]) -> Node:
        """A text value with its references replaced."""
        whole = _REFERENCE.fullmatch(text)
        if whole is not None and whole.group(1) is not None:
            target = self.follow(whole.group(1), node, path, open_references)
            return Node(target.value, node.where)
        parts: list[str] = []
        position = 0
        for match in _REFERENCE.finditer(text):
            parts.append(text[position : match.start()])
            position = match.end()
            parts.append("${" if match.group(1) is None else self.piece(match.group(1), node, path, open_references))
        return Node("".join([*parts, text[position:]]), node.where)

    def piece(self, reference: str, node: Node, path: Path, open_references: tuple[str, ...]) -> str:
        """The text of a reference inside longer text."""
        value = self.follow(reference, node, path, open_references).value
        if isinstance(value, str):
            return value
        if isinstance(value, dict | list):
            self.report(node, path, f"`${{{reference}}}` is a block and cannot stand inside text; refer to one value")
            return ""
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    def follow(self, reference: str, node: Node, path: Path, open_references: tuple[str, ...]) -> Node:
        """The resolved target of a reference; a problem is noted and null returned where there is none."""
        reference = reference.strip()
        if reference.startswith("env:"):
            return self.environment(reference.removeprefix("env:").strip(), node, path)
        if len(open_references) > MAX_DEPTH:
            self.report(node, path, f"references follow each other more than {MAX_DEPTH} times; write the value")
            return Node(None, node.where)
        if reference in open_references:
            circle = " -> ".join([*open_references, reference])
            self.report(node, path, f"references go in a circle: {circle}; write one of them out")
            return Node(None, node.where)
        found = self.find(reference)
        if found is None:
            message = f"`${{{reference}}}` refers to nothing in this spec (defaults do not count); add that key or write the value"
            self.report(node, path, message)
            return Node(None, node.where)
        target, target_path = found
        return self.walk(target, target_path, (*open_references, reference))

    def find(self, reference: str) -> tuple[Node, Path] | None:
        """The unresolved node that a dotted reference means, and its path."""
        node = self.root
        path: Path = ()
        for part in reference.split("."):
            key: str | int | None = part
            if isinstance(node.value, list):
                key = list_index(node.value, part)
            below = None if key is None else child(node, key)
            if below is None or key is None:
                return None
            node, path = below, (*path, key)
        return node, path

    def environment(self, name: str, node: Node, path: Path) -> Node:
        """The value of an environment variable, where one may stand."""
        if _SECRET_NAME.search(name):
            self.report(
                node, path, f"`${{env:{name}}}` looks like a secret; list it under `secrets` as {{env: {name}}}"
            )
        elif not any(_matches(path, pattern) for pattern in ENV_ALLOWED):
            message = f"`${{env:{name}}}` is not allowed here; use an override on the command line"
            self.report(node, path, message, allowed=f"environment variables may stand in {', '.join(ENV_ALLOWED)}")
        elif name not in os.environ:
            self.report(node, path, f"environment variable `{name}` is not set; export it or write the value")
        else:
            return Node(os.environ[name], node.where)
        return Node(None, node.where)

    def report(self, node: Node, path: Path, message: str, allowed: str | None = None) -> None:
        self.problems.append(SpecProblem(node.where, dotted(self.root, path), message, allowed=allowed))


def _matches(path: Path, pattern: str) -> bool:
    """Whether `path` is what a dotted pattern with `*` items means."""
    parts = pattern.split(".")
    return len(parts) == len(path) and all(p in ("*", str(k)) for p, k in zip(parts, path, strict=True))
