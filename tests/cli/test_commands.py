"""Laws of the light commands: what they print, and that mistakes end them before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_like.pipeline.run_folder import RunFolder
from nemo_rl_like.spec.loader import json_schema, load_spec, spec_hash
from tests.cli.command import nrl

SPEC = """\
output: run
model: {init: {}, tokenizer: {characters: "0123456789+="}}
environment: {name: arithmetic}
stages:
  - {kind: rl, steps: 1}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


def test_validate_says_ok_and_the_hash(spec: Path) -> None:
    done = nrl("validate", str(spec), "--json", "stages.rl.steps=2")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found == {
        "ok": True,
        "name": "experiment",
        "spec_hash": spec_hash(load_spec(spec, ["stages.rl.steps=2"])),
        "stages": ["rl"],
        "problems": [],
    }
    assert nrl("validate", str(spec)).stdout.startswith(f"{spec}: ok")


def test_validate_as_json_lists_each_problem(spec: Path) -> None:
    done = nrl("validate", str(spec), "--json", "stages.rl.stpes=2", "sead=1")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert {p["path"]: p["suggestion"] for p in found["problems"]} == {"stages.rl.stpes": "steps", "sead": "seed"}
    assert set(found["problems"][0]) == {"file", "line", "path", "message", "suggestion", "allowed", "help"}


def test_validate_finds_wrong_references_between_stages(spec: Path) -> None:
    done = nrl("validate", str(spec), "stages.rl.init_from=sft")
    assert done.returncode == 2
    assert "there is no stage 'sft'" in done.stderr
    found = json.loads(nrl("validate", str(spec), "--json", "stages.rl.init_from=sft").stdout)
    assert "there is no stage 'sft'" in found["problems"][0]["message"]


def test_schema_prints_the_schema() -> None:
    assert json.loads(nrl("schema").stdout) == json_schema()


def test_env_list_names_the_ready_made_environments() -> None:
    listed = {e["name"] for e in json.loads(nrl("env", "list", "--json").stdout)}
    assert {"arithmetic", "calculator", "reasoning_gym"} <= listed


def test_run_ends_on_a_bad_key_before_anything_is_made(spec: Path) -> None:
    done = nrl("run", str(spec), "stages.rl.stpes=2", cwd=spec.parent)
    assert done.returncode == 2
    assert "did you mean `steps`" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (spec.parent / "run").exists()


def test_run_refuses_an_output_folder_with_a_run(spec: Path) -> None:
    with RunFolder.open(spec.parent / "run", "new"):
        (spec.parent / "run/rl").mkdir()
    done = nrl("run", str(spec), cwd=spec.parent)
    assert done.returncode == 2
    assert "--resume" in done.stderr and "--overwrite" in done.stderr


@pytest.mark.parametrize("command", ["run", "resume"])
def test_an_output_folder_that_is_a_file_or_no_run_is_an_error(spec: Path, command: str) -> None:
    (spec.parent / "run").write_text("a file")
    done = nrl(command, str(spec if command == "run" else spec.parent / "run"), cwd=spec.parent)
    assert done.returncode == 2
    assert str(spec.parent / "run") in done.stderr or "output folder run is a file" in done.stderr


def test_resume_and_overwrite_exclude_each_other(spec: Path) -> None:
    done = nrl("run", str(spec), "--resume", "--overwrite")
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
