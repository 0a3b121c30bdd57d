"""NVIDIA NeMo-Run as a way to submit: an Experiment with one task a stage, each after the success of the one before.

It wants other versions of what vLLM needs, so it lives in an environment of its own (`pip install 'nemo-rl-like[nemo-run]'`); jobs run in theirs. Tested
with nemo-run 0.11.1, leptonai 0.27.3 and torchx 0.7.0. What it does not do well, and what is done about it, stands in docs/nemo_run.md.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch.target import Job, JobStatus, Rendered, State
from nemo_rl_like.pipeline.wiring import wire
from nemo_rl_like.spec.launch import LaunchSpec
from nemo_rl_like.spec.slurm import SlurmSpec

INSTALL = "pip install 'nemo-rl-like[nemo-run]'"
HOME = "nemo-run"
"""Folder of NeMo-Run's own files, in the submission's."""
PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
"""Words that a shell takes as they are: NeMo-Run writes paths, images and mounts into its script without quotes."""
POLL_S = 0.5


class NemoRunTarget(ABC):
    """A job through NeMo-Run; the subclasses say where.

    `nrl node` gets its variables from the spec, never through NeMo-Run, which would write them into a script without quotes.
    """

    name = "nemo-run"

    def problems(self, job: Job) -> list[str]:
        """Fields that NeMo-Run cannot honour, each with value, limit and fix."""
        return [*_words(job), *self._problems(job.spec.launch)]

    def render(self, job: Job) -> Rendered:
        """A script for each stage; NeMo-Run makes the rest from them when the job is submitted."""
        names = _stages(job)
        files = {_script(i): _stage_script(job, i, name) for i, name in enumerate(names)}
        where = self.name.rpartition("-")[2]
        return Rendered(files, ("nrl", "submit", str(job.folder / "spec.yaml"), "--to", where, "--via", "nemo-run"))

    def dry_run(self, job: Job, rendered: Rendered) -> None:
        """NeMo-Run is installed and takes the experiment. Raises SubmitError."""
        with tempfile.TemporaryDirectory() as folder:
            job = replace(job, folder=Path(folder))
            for name, text in rendered.files.items():
                (job.folder / name).write_text(text, encoding="utf-8")
            with self._experiment(job) as experiment:
                experiment.dryrun(log=False)

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Run the experiment: on Slurm until all jobs are queued, on this machine until the last stage has ended.

        Raises:
            SubmitError: NeMo-Run is not installed, or one of its schedulers refuses.
        """
        with self._experiment(job) as experiment:
            try:
                experiment.run(sequential=False, detach=True, tail_logs=False)
            except Exception as error:
                raise SubmitError(f"NeMo-Run could not start the experiment: {error}") from error
            return str(experiment._id)

    def status(self, job_id: str, folder: Path) -> JobStatus:
        """From the tasks: failed if one is, done if all are."""
        tasks: Mapping[str, Mapping[str, Any]] = _experiment(job_id, folder).status(return_dict=True)
        states = {name: str(task["status"]).split(".")[-1].split(" ")[0] for name, task in tasks.items()}
        return _overall(states, _exit_code(folder))

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Lines of each stage's driver in turn; with `follow` until the experiment ends."""
        index, read = 0, 0
        while True:
            over = not follow or self.status(job_id, folder).state not in ("queued", "running")
            while (log := folder / f"{HOME}-{index}.0.log").exists():
                with log.open("rb") as file:
                    file.seek(read)
                    whole, newline, rest = file.read().rpartition(b"\n")
                yield from whole.decode("utf-8", "replace").split("\n") if newline else ()
                read += len(whole) + len(newline)
                if not (folder / f"{HOME}-{index + 1}.0.log").exists():
                    if over and rest:
                        yield rest.decode("utf-8", "replace")
                    break
                index, read = index + 1, 0
            if over:
                return
            time.sleep(POLL_S)

    def cancel(self, job_id: str, folder: Path) -> None:
        """End every task; no error where one has ended."""
        experiment = _experiment(job_id, folder)
        for name in experiment.status(return_dict=True):
            experiment.cancel(name)

    @abstractmethod
    def _problems(self, launch: LaunchSpec) -> Iterator[str]:
        """Fields that the executor cannot honour."""

    @abstractmethod
    def _executor(self, job: Job, run: Any) -> Any:
        """NeMo-Run's executor for the job."""

    def _experiment(self, job: Job) -> Any:
        """NeMo-Run's experiment with the stages as tasks; to be entered."""
        run = _nemo_run(job.folder)
        return _Filled(run, job, self._executor(job, run))


class NemoRunLocal(NemoRunTarget):
    """Stages one after the other on this machine."""

    name = "nemo-run-local"

    def _problems(self, launch: LaunchSpec) -> Iterator[str]:
        if launch.nodes > 1:
            yield f"`launch.nodes` is {launch.nodes}, and NeMo-Run's LocalExecutor has one host; set it to 1, or submit to slurm"
        if launch.time_limit_min is not None:
            yield f"`launch.time_limit_min` is {launch.time_limit_min}, which NeMo-Run's LocalExecutor does not know; leave it out"
        if launch.image is not None:
            yield f"`launch.image` is {launch.image}, and NeMo-Run's LocalExecutor has no containers; leave it out, or submit with `--to container`"

    def _executor(self, job: Job, run: Any) -> Any:
        return run.LocalExecutor(packager=run.Packager())


class NemoRunSlurm(NemoRunTarget):
    """Stages as Slurm jobs, each after the one before (`afterok`)."""

    name = "nemo-run-slurm"

    def _problems(self, launch: LaunchSpec) -> Iterator[str]:
        if launch.time_limit_min is None:
            yield "`launch.time_limit_min` is not set, and NeMo-Run would take ten minutes; set it"
        if launch.slurm.account is None:
            yield "`launch.slurm.account` is not set, and NeMo-Run's SlurmExecutor needs one; set it"
        plain = SlurmSpec(partition=launch.slurm.partition, account=launch.slurm.account)
        for field in type(plain).model_fields:
            if getattr(launch.slurm, field) != getattr(plain, field):
                yield f"`launch.slurm.{field}` is {getattr(launch.slurm, field)!r}, which is not handed to NeMo-Run; leave it out, or submit without `--via`"

    def _executor(self, job: Job, run: Any) -> Any:
        launch = job.spec.launch
        assert launch.time_limit_min is not None
        hours, minutes = divmod(launch.time_limit_min, 60)
        memory = launch.memory_gib_per_node
        executor = run.SlurmExecutor(
            account=launch.slurm.account,
            partition=launch.slurm.partition,
            nodes=launch.nodes,
            ntasks_per_node=1,
            gpus_per_node=launch.devices_per_node if launch.accelerator == "gpu" else None,
            cpus_per_task=launch.cpus_per_node,
            mem=None if memory is None else f"{int(memory * 1024)}M",
            time=f"{hours:02d}:{minutes:02d}:00",
            signal=f"USR1@{int(launch.save_before_end_s)}",
            container_image=launch.image,
            container_mounts=_container_mounts(job) if launch.image else [],
            packager=run.Packager(),
            poll_estimated_start_time=False,
            # It looks for its files below this folder and nowhere else.
            tunnel=run.LocalTunnel(job_dir=str(job.folder / HOME / "experiments")),
        )
        executor.retries = launch.retries
        executor.srun_args = ["--mpi=none"]
        return executor


class _Filled:
    """An experiment that is filled with its tasks when it is entered."""

    def __init__(self, run: Any, job: Job, executor: Any) -> None:
        self._run, self._job = run, job
        self._experiment = run.Experiment(job.name, executor=executor, log_level="WARN")

    def __enter__(self) -> Any:
        experiment = self._experiment.__enter__()
        before: list[str] = []
        for index, name in enumerate(_stages(self._job)):
            script = self._run.Script(path=str(self._job.folder / _script(index)))
            before = [experiment.add(script, name=_task(index, name), dependencies=before)]
        return experiment

    def __exit__(self, *error: Any) -> Any:
        return self._experiment.__exit__(*error)


def _stages(job: Job) -> list[str]:
    """Names of the stages to run, in order."""
    names = [w.name for w in wire(job.spec)]
    return names if job.until is None else names[: names.index(job.until) + 1]


def _script(index: int) -> str:
    return f"{HOME}-{index}.sh"


def _task(index: int, name: str) -> str:
    return f"{index}-{re.sub(r'[^A-Za-z0-9-]+', '-', name)}"


def _stage_script(job: Job, index: int, stage: str) -> str:
    """What NeMo-Run starts on each host for a stage. On this machine it goes on after a failed task, so each looks at the one before."""
    base = shlex.quote(str(job.folder / HOME))
    node = shlex.join(["nrl", "node", str(job.folder / "spec.yaml"), "--until", stage])
    before = [f'[[ "$(cat {base}-{index - 1}.0.exit)" == 0 ]] || exit 1'] if index else []
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "set -euo pipefail",
            *before,
            f"cd {shlex.quote(str(job.working_folder))}",
            f"part={base}-{index}.${{SLURM_PROCID:-0}}",
            f'exec {node} --exit-code-file "$part.exit" >>"$part.log" 2>&1',
            "",
        ]
    )


def _container_mounts(job: Job) -> list[str]:
    mounts = [f"{m.source}:{m.target}" + (":ro" if m.read_only else "") for m in job.spec.launch.mounts]
    own = [f for f in (job.folder, job.working_folder) if f != Path("/")]
    return [*mounts, *(f"{f}:{f}" for f in dict.fromkeys(own))]


def _words(job: Job) -> Iterator[str]:
    """What NeMo-Run would write into its script, and a shell would read as more than one word."""
    launch = job.spec.launch
    given = {
        "the submission's folder (`output`)": str(job.folder),
        "the working folder": str(job.working_folder),
        "launch.image": launch.image,
        "launch.slurm.partition": launch.slurm.partition,
        "launch.slurm.account": launch.slurm.account,
    }
    given |= {f"launch.mounts[{i}].source": m.source for i, m in enumerate(launch.mounts)}
    given |= {f"launch.mounts[{i}].target": m.target for i, m in enumerate(launch.mounts)}
    for field, value in given.items():
        if value is not None and not PLAIN.fullmatch(value):
            yield f"{field} is {value!r}, and NeMo-Run writes it into a script without quotes; use letters, digits and _@%+=:,./- only"
        elif (
            value is not None and value.startswith("/") and launch.image is not None and re.search(r"[:,]|\.\.", value)
        ):
            yield f"{field} is {value!r}, which the container mounts; write it without `:`, `,` and `..`"


def _overall(states: Mapping[str, str], code: int | None) -> JobStatus:
    detail = ", ".join(f"{name} {state.lower()}" for name, state in sorted(states.items()))
    found = set(states.values())
    state: State = "unknown"
    if "FAILED" in found:
        state = "failed"
    elif "CANCELLED" in found:
        state = "cancelled"
    elif found == {"SUCCEEDED"}:
        state = "done"
    elif "RUNNING" in found:
        state = "running"
    elif found & {"SUBMITTED", "PENDING", "UNSUBMITTED"}:
        state = "queued"
    return JobStatus(state, detail, code)


def _exit_code(folder: Path) -> int | None:
    """Of the last stage that ended."""
    codes = sorted(folder.glob(f"{HOME}-*.0.exit"), key=lambda p: int(p.name.split(".")[0].rsplit("-", 1)[1]))
    return int(codes[-1].read_text(encoding="ascii")) if codes else None


def _experiment(job_id: str, folder: Path) -> Any:
    run = _nemo_run(folder)
    try:
        return run.Experiment.from_id(job_id)
    except AssertionError as error:
        raise SubmitError(f"NeMo-Run has no experiment {job_id!r} below {folder / HOME}: {error}") from None


def _nemo_run(folder: Path) -> Any:
    """The package, with its files below the submission's folder. Raises SubmitError where it is not installed."""
    try:
        import nemo_run
        from nemo_run.config import set_nemorun_home
    except ImportError as error:
        raise SubmitError(
            f"NeMo-Run cannot be imported here ({error}); it needs an environment of its own: `{INSTALL}` in a new one, and submit from there"
        ) from None
    set_nemorun_home(str(folder / HOME))
    return nemo_run
