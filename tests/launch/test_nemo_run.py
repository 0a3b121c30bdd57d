"""NeMo-Run: scripts of stages, what it cannot honour, and the real package in an environment of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch.nemo_run import NemoRunLocal, NemoRunSlurm, _overall
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import resolved_yaml
from tests.launch.kubernetes.jobs import make_spec

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SLURM = {"time_limit_min": 90, "slurm": {"account": "rl", "partition": "gpu"}}


def make_job(folder: Path = Path("/shared/run.jobs/0001"), **launch: Any) -> Job:
    values = make_spec(launch, output="/shared/run").model_dump(mode="json")
    stages = [{"kind": "sft", "data": {"environment_demonstrations": True}}, {"kind": "rl"}, {"kind": "export"}]
    spec = ExperimentSpec.model_validate({**values, "stages": stages})
    return Job("tiny", spec, folder, working_folder=Path("/shared"))


def test_each_stage_is_a_script_that_runs_to_it(tmp_path: Path) -> None:
    files = NemoRunLocal().render(make_job()).files
    assert [re.findall(r"--until (\S+)", text) for text in files.values()] == [["sft"], ["rl"], ["export"]]
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        done = subprocess.run(
            [str(BIN / "shellcheck"), str(tmp_path / name)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout
    assert list(NemoRunLocal().render(replace(make_job(), until="rl")).files) == list(files)[:2]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"nodes": 2}, "`launch.nodes` is 2"),
        ({"time_limit_min": 60}, "`launch.time_limit_min` is 60"),
        ({"image": "x"}, "`launch.image` is x"),
    ],
)
def test_what_the_local_executor_lacks_is_named(launch: dict[str, Any], message: str) -> None:
    (problem,) = NemoRunLocal().problems(make_job(**launch))
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({**SLURM, "time_limit_min": None}, "`launch.time_limit_min` is not set"),
        ({**SLURM, "slurm": {}}, "`launch.slurm.account` is not set"),
        ({**SLURM, "mounts": [{"source": "/a b", "target": "/b"}]}, "launch.mounts[0].source is '/a b'"),
        ({**SLURM, "image": "x;reboot"}, "launch.image is 'x;reboot'"),
    ],
)
def test_what_slurm_through_nemo_run_lacks_is_named(launch: dict[str, Any], message: str) -> None:
    (problem,) = NemoRunSlurm().problems(make_job(**launch))
    assert problem.startswith(message)


def test_a_folder_that_a_shell_would_split_is_refused() -> None:
    assert NemoRunSlurm().problems(make_job(**SLURM)) == []
    (problem,) = NemoRunSlurm().problems(make_job(Path("/shared/my run.jobs/0001"), **SLURM))
    assert "'/shared/my run.jobs/0001', and NeMo-Run writes it into a script without quotes" in problem


def test_what_to_install_is_told_where_it_is_missing(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(SubmitError, match=re.escape("pip install 'nemo-rl-like[nemo-run]'")):
        NemoRunLocal().submit(job, NemoRunLocal().render(job))


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("SUCCEEDED", "SUCCEEDED"), "done"),
        (("SUCCEEDED", "FAILED"), "failed"),
        (("SUCCEEDED", "RUNNING"), "running"),
        (("SUCCEEDED", "PENDING"), "queued"),
        (("SUBMITTED", "PENDING"), "queued"),
        (("SUCCEEDED", "CANCELLED"), "cancelled"),
        (("SUCCEEDED", "UNKNOWN"), "unknown"),
    ],
)
def test_an_experiment_is_as_far_as_its_tasks(states: tuple[str, str], state: str) -> None:
    assert _overall(dict(zip(("0-sft", "1-rl"), states, strict=True)), None).state == state


def test_logs_of_stages_are_read_in_turn(tmp_path: Path) -> None:
    (tmp_path / "nemo-run-0.0.log").write_text("a\n\nb\n", encoding="utf-8")
    (tmp_path / "nemo-run-1.0.log").write_text("c\nno end", encoding="utf-8")
    assert list(NemoRunLocal().logs("x", tmp_path, follow=False)) == ["a", "", "b", "c", "no end"]


class Environment:
    """NeMo-Run at the versions that `pyproject.toml` pins, and a double of `nrl` in PATH: it writes its words, and fails in the stage NRL_FAILS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run.jobs"
        self.folder.mkdir()
        pins = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        self._uv("venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
        self.python = folder / "venv/bin/python"
        wanted = [*pins["optional-dependencies"]["nemo-run"], *pins["dependencies"]]
        self._uv("pip", "install", "--quiet", "--python", str(self.python), *wanted)
        (folder / "bin").mkdir()
        program = folder / "bin/nrl"
        program.write_text(
            '#!/bin/bash\n[[ "$4" == "${NRL_FAILS:-}" ]] && code=3 || code=0\n'
            'echo "$1 $(basename "$2") $3 $4 in $PWD"\necho "$code" >"$6"\nexit "$code"\n',
            encoding="utf-8",
        )
        program.chmod(0o755)
        self.variables = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
        }

    @staticmethod
    def _uv(*words: str) -> None:
        done = subprocess.run([str(BIN / "uv"), *words], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr

    def submit(self, **variables: str) -> dict[str, Any]:
        spec = self.folder / "spec.yaml"
        spec.write_text(resolved_yaml(make_job().spec), encoding="utf-8")
        words = [str(self.python), str(ROOT / "tests/launch/nemo_run_program.py"), str(spec), str(self.folder)]
        done = subprocess.run(
            words, env={**self.variables, **variables}, capture_output=True, text=True, timeout=300, cwd=self.folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (told,) = re.findall(r"^TOLD (.*)$", done.stdout, re.MULTILINE)
        return json.loads(told)  # type: ignore[no-any-return]

    def dry_run_on_slurm(self) -> str:
        """The scripts that the real SlurmExecutor makes."""
        code = (
            "import sys; from pathlib import Path; from nemo_rl_like.launch.nemo_run import NemoRunSlurm;"
            "from nemo_rl_like.launch.target import Job; from nemo_rl_like.spec.loader import load_spec;"
            "folder = Path(sys.argv[1]); job = Job('tiny', load_spec(folder / 'spec.yaml'), folder, working_folder=folder);"
            "target = NemoRunSlurm(); assert target.problems(job) == [], target.problems(job);"
            "[(folder / n).write_text(t) for n, t in target.render(job).files.items()]\n"
            "with target._experiment(job) as experiment: experiment.dryrun(log=True)"
        )
        launch = {**SLURM, "nodes": 2, "image": "nvcr.io/x/nrl:1", "mounts": [{"source": "/data", "target": "/data"}]}
        (self.folder / "spec.yaml").write_text(resolved_yaml(make_job(**launch).spec), encoding="utf-8")
        words = [str(self.python), "-c", code, str(self.folder)]
        variables = {**self.variables, "COLUMNS": "400", "TERM": "dumb"}
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300, cwd=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join(done.stdout.split())


@pytest.mark.slow
def test_the_real_package_runs_stages_in_order_and_none_after_a_failed_one(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    told = environment.submit()
    assert (told["state"], told["code"]) == ("done", 0)
    assert told["lines"] == [
        f"node spec.yaml --until {stage} in {environment.folder}" for stage in ("sft", "rl", "export")
    ]
    for path in environment.folder.glob("nemo-run-*.0.*"):
        path.unlink()
    told = environment.submit(NRL_FAILS="rl")
    assert (told["state"], told["code"]) == ("failed", 3)
    assert [line.split()[3] for line in told["lines"]] == ["sft", "rl"]
    script = environment.dry_run_on_slurm()
    for directive in (
        "--account=rl",
        "--partition=gpu",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=01:30:00",
        "--signal=USR1@300",
        "--gpus-per-node=8",
    ):
        assert f"#SBATCH {directive} " in script
    assert script.count("--container-image nvcr.io/x/nrl:1") >= 3 and "--container-mounts /data:/data" in script
    assert len(re.findall(r"bash \S+/nemo-run-\d\.sh", script)) == 3
