"""Laws of the job script: whatever a field holds, the script's structure stays; what it cannot hold is refused by name."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl_like.artifacts.errors import OutputFolderError, SpecError, SubmitError
from nemo_rl_like.cli.commands.job import request_of, show
from nemo_rl_like.launch import registry
from nemo_rl_like.launch.nemo_run import _stage_script
from nemo_rl_like.launch.slurm.accounting import Accounts
from nemo_rl_like.launch.slurm.refusals import fix
from nemo_rl_like.launch.slurm.script import NAME
from nemo_rl_like.launch.slurm.target import SlurmTarget, _status, _told
from nemo_rl_like.launch.submission import Record, find, outputs, write_record
from nemo_rl_like.launch.submit import Request, _job, _parts, _specs, dry_run
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.loader import load_spec, resolved_yaml

ROOT = Path(__file__).parents[2]
HOSTILE = [
    '"',
    "'",
    "`",
    "$(touch x)",
    "; touch x",
    "\n#SBATCH --uid=0",
    "\\",
    " --wrap=x",
    "#",
    "%j",
    "${HOME}",
    "|",
    "&",
    "é",
]
VALUES: dict[str, Any] = {
    "output": "/shared/run",
    "name": "exp",
    "model": {"init": {}, "tokenizer": {"characters": "0123456789+="}},
    "environment": {"name": "arithmetic"},
    "stages": [{"kind": "evaluate", "name": "last"}],
}
WORDS = ("partition", "account", "qos", "reservation", "constraint", "exclude", "gres_type", "comment", "mail_user")


def job_of(
    launch: dict[str, Any] | None = None, *, folder: str = "/shared/run.jobs/0001", cwd: str = "/home/me", **top: Any
) -> Job:
    spec = ExperimentSpec.model_validate({**VALUES, **top, "launch": launch or {}})
    found = _job(Request(spec, "slurm", Path(cwd)), Path(folder))
    return found


def rendered(job: Job) -> str:
    return SlurmTarget().render(job).files[NAME]


def structure(script: str) -> list[str]:
    """The script without what stands in its fields: option names of the directives, and the body with its words blanked."""
    lines = script.split("\n")
    directives = [line.partition("=")[0] for line in lines if line.startswith("#SBATCH")]
    body = [line for line in lines if not line.startswith("#SBATCH")]
    return directives + [flag_of(line) if "--container-" in line else line for line in body]


def flag_of(line: str) -> str:
    """The name of a flag of srun that stands alone on its line, as one word to the shell."""
    (word,) = shlex.split(line.removesuffix("\\"))
    return word.partition("=")[0]


text = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=4)), min_size=1, max_size=3).map("".join)


@settings(deadline=None, max_examples=150)
@given(field=st.sampled_from((*WORDS, "image", "mount")), value=text)
def test_no_text_of_a_field_changes_the_scripts_structure(field: str, value: str) -> None:
    def launch_with(words: str) -> dict[str, Any]:
        base: dict[str, Any] = {"image": "nvcr.io/nvidia/x:1", "mounts": [{"source": "/a", "target": "/a"}]}
        if field == "image":
            return base | {"image": words}
        if field == "mount":
            return base | {"mounts": [{"source": f"/{words}", "target": "/a"}]}
        return base | {"slurm": {field: words}}

    try:
        job = job_of(launch_with(value))
    except ValidationError as error:
        assert field in str(error), error
        return
    if SlurmTarget().problems(job):
        return
    script = rendered(job)
    assert structure(script) == structure(rendered(job_of(launch_with("harmless"))))
    flags = script[script.index("srun --kill") :].partition(" &\n")[0]
    assert len(shlex.split(flags.replace("\\\n", " "))) == 13, "one word a flag, as the shell sees it"


@settings(deadline=None, max_examples=80)
@given(name=text, path=text)
def test_names_and_paths_are_made_harmless_or_refused(name: str, path: str) -> None:
    job = job_of(name=name, folder=f"/shared/{path}.jobs/0001", cwd=f"/home/{path}")
    safe = re.fullmatch(r"[\w./@+=:-]*", path, re.ASCII) is not None
    assert bool(SlurmTarget().problems(job)) is not safe
    if safe:
        blank = [line.replace(str(job.folder), "/shared/run.jobs/0001") for line in structure(rendered(job))]
        assert blank == structure(rendered(job_of()))
    assert re.fullmatch(r"[A-Za-z0-9-]+", job.name)


WORD_WRITER = '#!/bin/sh\nprintf "%s\\0" "$@" >"${0%/*}/words"\n'


def words_of(script: str, command: str, folder: Path) -> list[str]:
    """What a shell that runs the script hands to a command, which a stand-in of this name writes down."""
    (folder / command).write_text(WORD_WRITER)
    (folder / command).chmod(0o755)
    (folder / "script.sh").write_text(script)
    environ = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "script.sh"], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return (folder / "words").read_bytes().decode().split("\0")[:-1]


@settings(deadline=None, max_examples=40)
@given(until=text.filter(lambda words: "\0" not in words))
def test_a_shell_hands_on_the_last_stage_as_one_word_whatever_it_holds(until: str) -> None:
    """By the renderers alone: `nrl submit` refuses a name that is no stage's before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = replace(job_of(folder=name, cwd=name), until=until)
        words = words_of(rendered(job), "srun", folder)
        given_to_node = words[words.index("node") :]
        assert given_to_node == ["node", f"{folder}/spec.yaml", "--stop-file", f"{folder}/stop", "--until", until]
        assert words_of(_stage_script(job, 0, until), "nrl", folder)[2:4] == ["--until", until]
        assert {path.name for path in folder.iterdir()} <= {"srun", "nrl", "script.sh", "words", "nemo-run-0.0.log"}


@pytest.mark.parametrize("until", ["", "lost", "last; touch x", "$(touch x)", "--wait", "last\n"])
@pytest.mark.parametrize("target", registry.TARGETS)
def test_a_last_stage_that_is_none_is_refused_before_anything_is_rendered(target: str, until: str) -> None:
    with pytest.raises(
        SpecError, match=f"--until is {re.escape(repr(until))}, and the stages are last; (name|did you)"
    ):
        dry_run(Request(job_of().spec, target, Path("/home/me"), until=until))


def test_what_would_be_submitted_is_shown_where_there_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="sbatch"):
        show(Request(job_of().spec, "slurm", Path("/home/me")))
    shown = capsys.readouterr().out
    assert "/spec.yaml\n" in shown and "#SBATCH --signal=B:USR1@" in shown and "--- command\nsbatch --parsable" in shown


def test_one_job_a_stage_ends_with_the_last_stage_that_was_asked_for() -> None:
    stages = [{"kind": "evaluate", "name": name} for name in ("first", "second", "third")]
    request = Request(job_of(stages=stages).spec, "slurm", Path("/home/me"), stages_as_jobs=True, until="second")
    assert [part.until for part in _parts(request)] == ["first", "second"]


@pytest.mark.parametrize("seeds", ["1;touch x", "$(touch x)", "1 2", "a"])
def test_seeds_that_are_no_numbers_are_refused(tmp_path: Path, seeds: str) -> None:
    (tmp_path / "spec.yaml").write_text(resolved_yaml(job_of().spec))
    with pytest.raises(SpecError, match="--seeds is"):
        request_of(tmp_path / "spec.yaml", [], "slurm", via=None, seeds=seeds, stages_as_jobs=False, until=None)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"mounts": [{"source": "/a", "target": "/b"}]}, "`launch.mounts` is given without `launch.image`"),
        ({"image": "x", "mounts": [{"source": "/a:b", "target": "/b"}]}, "pyxis takes no"),
        ({"accelerator": "cpu", "slurm": {"gres_type": "h100"}}, "`launch.slurm.gres_type` is h100"),
        ({"accelerator": "cpu", "generation": {"gres_type": "l40s"}}, "`launch.generation.gres_type` is l40s"),
        ({"slurm": {"mail_type": ["END"]}}, "`launch.slurm.mail_type`"),
    ],
)
def test_what_slurm_cannot_honour_is_named(launch: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in SlurmTarget().problems(job_of(launch)))


@pytest.mark.parametrize(
    ("said", "launch", "told"),
    [
        (
            "Invalid partition name specified",
            {"slurm": {"partition": "gpu"}, "generation": {"partition": "inference"}},
            ["`launch.slurm.partition` (gpu), `launch.generation.partition` (inference)", "`sinfo`"],
        ),
        ("invalid partition specified: gpu", {"slurm": {"partition": "gpu"}}, ["`launch.slurm.partition` (gpu);"]),
        (
            "Invalid account or account/partition combination specified",
            {"slurm": {"account": "research"}},
            ["`launch.slurm.account` (research);", "`sacctmgr"],
        ),
        (
            "Invalid account or account/partition combination specified",
            {},
            ["`launch.slurm.account`, which is not set"],
        ),
        ("Invalid qos specification", {"slurm": {"qos": "high"}}, ["`launch.slurm.qos` (high)"]),
        ("Invalid feature specification", {"slurm": {"constraint": "h100"}}, ["`launch.slurm.constraint` (h100)"]),
        ("Requested reservation is invalid", {"slurm": {"reservation": "r"}}, ["`launch.slurm.reservation` (r)"]),
        (
            "Requested time limit is invalid (missing or exceeds some limit)",
            {},
            ["`launch.time_limit_min`, which is not"],
        ),
        ("Invalid generic resource (gres) specification", {}, ["`launch.devices_per_node` (8)"]),
        ("Invalid node name specified", {"slurm": {"exclude": "n9"}}, ["`launch.slurm.exclude` (n9)"]),
        (
            "Memory required by task is not available",
            {"memory_gib_per_node": 9},
            ["`launch.memory_gib_per_node` (9.0)"],
        ),
        (
            "Requested node configuration is not available",
            {"nodes": 4, "cpus_per_node": 999},
            ["`launch.nodes` (4), `launch.devices_per_node` (8), `launch.cpus_per_node` (999);"],
        ),
        ("fatal: Could not establish a configuration source", {}, ["SLURM_CONF", "from a host of the cluster"]),
        ("Unable to contact slurm controller (connect failure)", {}, ["slurmctld up"]),
    ],
)
def test_a_refusal_names_the_fields_that_it_is_about(said: str, launch: dict[str, Any], told: list[str]) -> None:
    found = fix(f"`sbatch` refused (exit code 1): sbatch: error: {said}", job_of(launch).spec.launch)
    assert all(words in found for words in told), found


def test_a_refusal_in_words_of_its_own_stands_alone() -> None:
    assert fix("the site's filter says no", job_of().spec.launch) == ""


def test_secrets_do_not_stand_among_variables() -> None:
    with pytest.raises(ValidationError, match="WANDB_API_KEY looks like a secret"):
        job_of({"environment": {"WANDB_API_KEY": "x"}})


def test_a_job_that_would_be_told_to_save_after_its_end_is_refused() -> None:
    with pytest.raises(ValidationError, match="`save_before_end_s` is 300, and the job ends after 300 s"):
        job_of({"time_limit_min": 5})


def test_a_job_without_gpus_asks_for_none() -> None:
    assert "gres" not in rendered(job_of({"accelerator": "cpu"}))


def test_a_little_memory_is_not_all_of_it() -> None:
    """`--mem=0` is how sbatch is asked for all that a host has."""
    assert "--mem=1M" in rendered(job_of({"memory_gib_per_node": 0.0001}))


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    assert shutil.which("shellcheck"), "not installed; run `make install-system`"
    launch = {"image": "nvcr.io/nvidia/x:1", "time_limit_min": 60, "slurm": {"comment": "two words"}}
    for number, job in enumerate((job_of(launch), job_of(), job_of({"generation": {}}))):
        (tmp_path / f"{number}.sh").write_text(rendered(job))
    subprocess.run(["shellcheck", *map(str, sorted(tmp_path.iterdir()))], check=True)


@pytest.mark.parametrize("name", ["example", "generation"])
def test_the_reference_scripts_are_what_their_specs_render_to(name: str) -> None:
    """slurm/*.sh are for reading; they must not grow old."""
    spec = load_spec(ROOT / "slurm" / f"{name}.yaml")
    request = Request(spec, "slurm", Path("/lustre/me/project"))
    job = _job(request, Path(f"/lustre/me/project/runs/{name}.jobs/0001"))
    assert SlurmTarget().problems(job) == []
    assert (ROOT / "slurm" / f"{name}.sh").read_text() == rendered(job)
    assert len(rendered(job).splitlines()) < 60


GENERATION = {"nodes": 1, "devices_per_node": 4, "partition": "inference", "memory_gib_per_node": 2}


def parts(script: str) -> list[list[str]]:
    """Directives of each group of hosts."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    cut = [i for i, line in enumerate(lines) if line == "hetjob"]
    return [lines[a:b] for a, b in zip([0, *(i + 1 for i in cut)], [*cut, len(lines)], strict=True)]


def test_hosts_that_generate_are_a_group_of_their_own_which_takes_the_rest_from_those_that_train() -> None:
    launch = {
        "nodes": 2,
        "memory_gib_per_node": 8,
        "cpus_per_node": 6,
        "time_limit_min": 60,
        "generation": GENERATION,
        "slurm": {"partition": "batch", "account": "research", "qos": "high", "gres_type": "h100", "exclusive": True},
    }
    train, generate = parts(rendered(job_of(launch)))
    both = {"--job-name=exp", "--ntasks-per-node=1", "--cpus-per-task=6", "--time=60", "--requeue"}
    both |= {"--account=research", "--qos=high", "--exclusive"}
    assert set(generate) == both | {"--nodes=1", "--gres=gpu:h100:4", "--mem=2048M", "--partition=inference"}
    assert both | {"--nodes=2", "--gres=gpu:h100:8", "--mem=8192M", "--partition=batch"} < set(train)
    assert "srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --het-group=0,1 " in rendered(job_of(launch))
    assert "het" not in rendered(job_of({**launch, "generation": None}))


@settings(deadline=None, max_examples=60)
@given(field=st.sampled_from(("partition", "constraint", "gres_type")), value=text)
def test_no_text_of_a_group_changes_the_scripts_structure(field: str, value: str) -> None:
    try:
        job = job_of({"generation": {field: value}})
    except ValidationError as error:
        assert field in str(error), error
        return
    assert structure(rendered(job)) == structure(rendered(job_of({"generation": {field: "harmless"}})))


def test_an_array_has_one_spec_and_one_output_a_seed() -> None:
    job = _job(Request(job_of().spec, "slurm", Path("/home/me"), (3, 7)), Path("/shared/run.jobs/0001"))
    assert "#SBATCH --array=3,7\n" in rendered(job)
    assert [
        f"output: /shared/run-seed{seed}\n" in text and f"seed: {seed}\n" in text
        for seed, text in zip((3, 7), _specs(job).values(), strict=True)
    ] == [True, True]
    assert list(_specs(job)) == ["seed-3.yaml", "seed-7.yaml"]


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("PENDING", "0:0", ("queued", None)),
        ("COMPLETED", "0:0", ("done", 0)),
        ("FAILED", "3:0", ("failed", 3)),
        ("TIMEOUT", "0:15", ("failed", 143)),
        ("CANCELLED by 0", "0:15", ("cancelled", 143)),
        ("OUT_OF_MEMORY", "0:125", ("failed", 253)),
        ("PREEMPTED", "0:15", ("failed", 143)),
        ("NEW_STATE", "0:0", ("unknown", 0)),
    ],
)
def test_slurms_states_become_ours(state: str, code: str, expected: tuple[str, int | None]) -> None:
    found = _status(state, code, "None")
    assert (found.state, found.exit_code) == expected and state.split()[0] in found.detail


@pytest.mark.parametrize(
    ("fields", "state", "words"),
    [
        ({"JobState": "RUNNING", "NodeList": "node[1-2]"}, "running", "RUNNING, on node[1-2]"),
        ({"JobState": "RUNNING", "Restarts": "2"}, "running", "RUNNING, started again 2 times"),
        (
            {"JobState": "PENDING", "Reason": "Resources", "StartTime": "2030-01-02T03:04:05"},
            "queued",
            "PENDING, Resources, expected to start at 2030-01-02T03:04:05",
        ),
        ({"JobState": "PENDING", "Reason": "Priority", "StartTime": "Unknown"}, "queued", "PENDING, Priority"),
        ({"JobState": "FAILED", "ExitCode": "75:0", "ArrayTaskId": "3"}, "cancelled", "seed 3: FAILED, exit code 75:0"),
        ({"JobState": "FAILED", "ExitCode": "1:0", "ArrayTaskId": "8"}, "failed", "seed 8: FAILED, exit code 1:0"),
    ],
)
def test_a_task_is_told_with_its_place_its_starts_and_what_it_waits_for(
    tmp_path: Path, fields: dict[str, str], state: str, words: str
) -> None:
    (tmp_path / "cancelled-3").touch()
    found = _told({"ExitCode": "0:0", "Reason": "None", "NodeList": "(null)", "Restarts": "0", **fields}, tmp_path)
    assert (found.state, found.detail) == (state, words)


def test_a_seeds_output_is_its_task_of_the_array(tmp_path: Path) -> None:
    record = Record(target="slurm", job_id="7", command=(), submitted="", working_folder="/", seeds=(3, 8))
    (tmp_path / "run.jobs" / "0001").mkdir(parents=True)
    write_record(tmp_path / "run.jobs" / "0001", record)
    found = find(tmp_path / "run-seed8")
    assert (found.record.job_id, found.record.seeds) == ("7_8", (8,)) and outputs(found) == [tmp_path / "run-seed8"]
    assert outputs(find(tmp_path / "run")) == [tmp_path / "run-seed3", tmp_path / "run-seed8"]
    with pytest.raises(OutputFolderError, match="has no submission"):
        find(tmp_path / "run-seed4")


def test_a_job_by_accounting_is_its_last_start_and_the_gpu_time_of_all() -> None:
    gpus = "billing=4,cpu=4,gres/gpu:h100=8,gres/gpu=8,mem=1G,node=2"
    rows = [
        ("7", "REQUEUED", "0:0", "1800", gpus),
        ("7", "COMPLETED", "0:0", "900", gpus),
        ("8+1", "RUNNING", "0:0", "450", "cpu=1,gres/gpu=4"),
        ("9", "PENDING", "0:0", "0", ""),
    ]
    assert Accounts.of_rows(rows) == Accounts(
        (("COMPLETED", "0:0"), ("RUNNING", "0:0"), ("PENDING", "0:0")), (1800 * 8 + 900 * 8 + 450 * 4) / 3600
    )
    assert Accounts.of_rows([("7", "COMPLETED", "0:0", "900", "cpu=4,node=1")]).gpu_hours is None, "it counts no GPUs"
    assert Accounts.of_rows([]) == Accounts((), None)
