"""Rules that every source file keeps: nothing is unpickled, nothing goes through a shell, no model brings code of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "nemo_rl_like").rglob("*.py")), *sorted((ROOT / "environments").rglob("*.py"))]
FORBIDDEN = {
    "pickle.load": "unpickles",
    "pickle.loads": "unpickles",
    "marshal.loads": "unmarshals",
    "os.system": "goes through a shell",
    "os.popen": "goes through a shell",
    "eval": "runs text",
    "exec": "runs text",
    "yaml.load": "makes objects of tags",
    "yaml.unsafe_load": "makes objects of tags",
}
AUTO = re.compile(r"\bAuto\w+\.from_(pretrained|config)$")


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def broken(tree: ast.AST) -> Iterator[str]:
    for name, call in calls(tree):
        given = {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg is not None}
        if name in FORBIDDEN and not (name == "yaml.load" and "Loader" in given):
            yield f"line {call.lineno}: {name} {FORBIDDEN[name]}"
        if name == "torch.load" and given.get("weights_only") != "True":
            yield f"line {call.lineno}: torch.load without weights_only=True unpickles"
        if given.get("shell") not in (None, "False"):
            yield f"line {call.lineno}: {name} goes through a shell"
        if given.get("trust_remote_code") not in (None, "False"):
            yield f"line {call.lineno}: {name} lets a model bring code of its own"
        if AUTO.search(name) and given.get("trust_remote_code") != "False":
            yield f"line {call.lineno}: {name} without trust_remote_code=False asks whoever sits there whether to run a model's code"
        if name.endswith(".extractall") and given.get("filter") != "'data'":
            yield f"line {call.lineno}: {name} may write outside its folder"


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_rules_are_kept(file: Path) -> None:
    assert list(broken(ast.parse(file.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoConfig.from_pretrained(x)",
        "eval(x)",
        "yaml.load(x)",
        "archive.extractall(x)",
    ],
)
def test_the_rules_see_what_breaks_them(line: str) -> None:
    assert list(broken(ast.parse(line)))
