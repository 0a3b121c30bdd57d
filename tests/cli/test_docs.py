"""What the documents tell a reader to type is what the command line takes, and the YAML that they show is a spec."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from nemo_rl_like.cli.app import app
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec
from nemo_rl_like.spec.rl import RlStageSpec

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "slurm/README.md", ROOT / "k8s/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
BASE = {
    "output": "runs/x",
    "model": {"init": {}, "tokenizer": {"characters": "0123456789+="}},
    "environment": {"name": "arithmetic"},
    "stages": [{"kind": "rl"}],
}


def commands(text: str) -> Iterator[str]:
    """Every `nrl ...` of the blocks, and of the lines, where it is written out."""
    for language, body in BLOCK.findall(text):
        if language in ("bash", "console", "sh", ""):
            for line in body.replace("\\\n", " ").splitlines():
                for part in re.split(r"&&|\|\||[;|]", re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ")):
                    if re.match(r"\s*(\S+/)?nrl\s", part):
                        yield part.strip()
    yield from (found for found in re.findall(r"`(nrl [^`]+)`", BLOCK.sub("", text)) if not set(found) & set("|[<"))


UsageError = typer.BadParameter.__base__ or Exception
"""What the parser raises: Typer has a copy of Click of its own."""


def parsed(words: list[str]) -> dict[str, Any]:
    """A command's options and arguments, read by its own parser; nothing is run. Raises UsageError, KeyError for a command that is none."""
    command, names = typer.main.get_command(app), list(words)
    while isinstance(command, TyperGroup):
        count = 2 if " ".join(names[:2]) in command.commands else 1
        command, names = command.commands[" ".join(names[:count])], names[count:]
    if names and all(word.startswith("-") or before.startswith("-") for before, word in pairwise(["", *names])):
        required = [p for p in command.params if p.param_type_name == "argument" and p.required]
        names += ["X"] * len(required)  # a text names a command with the option that it is about
    return command.make_context(command.name, names).params if names else {}


CASES = [(path, line) for path in FILES for line in dict.fromkeys(commands(path.read_text(encoding="utf-8")))]


@pytest.mark.parametrize(("path", "line"), CASES, ids=[f"{p.stem}-{line[:60]}" for p, line in CASES])
def test_commands_are_what_the_command_line_takes(path: Path, line: str) -> None:
    given = parsed(shlex.split(line)[1:])
    named, overrides = given.get("spec"), list(given.get("overrides") or ())
    if overrides or (named is not None and (ROOT / str(named)).is_file()):
        file = ROOT / str(named)
        load_spec(file if file.is_file() else ROOT / "configs/demo.yaml", overrides)


@pytest.mark.parametrize(
    "words",
    ["pipeline pla x", "run a.yaml --until", "run a.yaml --resum", "submit a.yaml --to", "layout --gpus many x"],
)
def test_commands_that_are_none_are_seen(words: str) -> None:
    with pytest.raises((UsageError, KeyError)):
        parsed(words.split())


def test_every_document_was_read() -> None:
    assert len(CASES) > 90 and {p.name for p, _ in CASES} >= {
        "quickstart.md",
        "pipeline.md",
        "launch.md",
        "kubernetes.md",
    }


SHOWN = [(p, i, body) for p in FILES for i, (kind, body) in enumerate(BLOCK.findall(p.read_text())) if kind == "yaml"]


@pytest.mark.parametrize(("path", "index", "body"), SHOWN, ids=[f"{p.stem}-{i}" for p, i, _ in SHOWN])
def test_yaml_that_is_shown_is_a_spec(path: Path, index: int, body: str, tmp_path: Path) -> None:
    """Whole, or over one: blocks of it, or lines of an `rl` stage; stages by name change those of the demo."""
    body = textwrap.dedent(body)
    block = yaml.safe_load(body)
    over: dict[str, Any] = {key: value for key, value in BASE.items() if key not in block}
    if set(block) <= set(RlStageSpec.model_fields) - {"settings"}:
        over, body = BASE | {"stages": []}, yaml.safe_dump({"stages": [{"kind": "rl", **block}]})
        del over["stages"]
    elif isinstance(block.get("stages"), dict):
        over = {"extends": str(ROOT / "configs/demo.yaml")}
    elif block.get("policy", {}).get("backend") == "fsdp":
        over["engine"] = {"kind": "vllm"}
    assert set(yaml.safe_load(body)) <= set(ExperimentSpec.model_fields)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(over) + body, encoding="utf-8")
    load_spec(tmp_path / "spec.yaml")
