"""A container on this machine as a target of `nrl submit`: the words of `docker run` or `podman run`."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch import requirements
from nemo_rl_like.launch.kubernetes import names
from nemo_rl_like.launch.kubernetes.pod import command
from nemo_rl_like.launch.target import Job, JobStatus, Rendered
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.launch import MountSpec

ASK_S = 60.0
"""Longest wait for an answer of the runtime, in seconds."""
STOP_MARGIN_S = 60
"""Seconds that a container has beside `save_before_end_s` before it is killed."""
SAVED = 75


class ContainerTarget:
    """One container on this machine (`launch.container`).

    Args:
        user: user and group id of whoever submits, `uid:gid`; default: this process's.
    """

    name = "container"

    def __init__(self, user: str | None = None) -> None:
        self._user = user or f"{os.getuid()}:{os.getgid()}"

    def problems(self, job: Job) -> list[str]:
        """Fields that a container on one machine cannot honour, each with value, limit and fix."""
        spec = job.spec
        shm = spec.launch.container.shm_gib
        return [
            *requirements.image(spec),
            *requirements.variables(spec, _fixed(spec)),
            *requirements.memory(spec, "launch.container.shm_gib", shm),
            *requirements.paths(spec, "launch.mounts", [m.target for m in spec.launch.mounts]),
            *_one_machine(spec),
            *self._users(spec),
            *_folders(spec),
        ]

    def render(self, job: Job) -> Rendered:
        """The words of one `run`; no file but the submission's `spec.yaml`, and no value of a secret."""
        return Rendered({}, tuple(self._words(job)))

    def dry_run(self, job: Job, rendered: Rendered) -> None:
        """The runtime answers and has the image. Raises SubmitError."""
        runtime, image = job.spec.launch.container.runtime, str(job.spec.launch.image)
        _ask(runtime, "version")
        try:
            _ask(runtime, "image", "inspect", "--format", "{{.Id}}", image)
        except SubmitError as error:
            raise SubmitError(f"{error}; `{runtime} pull {image}` first") from None

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Start the container. Raises SubmitError with the runtime's words."""
        missing = sorted({s.env for s in job.spec.secrets.values()} - set(os.environ))
        if missing:
            raise SubmitError(
                f"{', '.join(missing)}: not set in this environment, and `secrets` names it; export it first"
            )
        container = _ask(*rendered.command).strip().splitlines()[-1]
        return f"{job.spec.launch.container.runtime}:{container}"

    def status(self, job_id: str, folder: Path) -> JobStatus:
        """How far the container is; `unknown` once it was removed."""
        runtime, container = _parse(job_id)
        try:
            state = json.loads(_ask(runtime, "inspect", "--format", "{{json .State}}", container))
        except SubmitError as error:
            if _is_gone(error):
                return JobStatus("unknown", "the container is not there: it was removed")
            raise
        return _status(state)

    def logs(self, job_id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Lines of the container's output and errors."""
        runtime, container = _parse(job_id)
        words = [_program(runtime), "logs", *(["--follow"] if follow else []), container]
        with subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield line.rstrip("\n")
            finally:
                process.terminate()

    def cancel(self, job_id: str, folder: Path) -> None:
        """Tell the container to save and stop; no error where it has ended or is gone."""
        runtime, container = _parse(job_id)
        try:
            grace = _ask(runtime, "inspect", "--format", "{{.Config.StopTimeout}}", container)
            _ask(runtime, "stop", container, deadline_s=float(grace) + ASK_S)
        except SubmitError as error:
            if not _is_gone(error):
                raise

    def _words(self, job: Job) -> Iterator[str]:
        launch = job.spec.launch
        spec = launch.container
        user = spec.user or self._user
        yield from (spec.runtime, "run", "--detach", "--init", "--name", f"nrl-{names.object_name(job)}")
        yield from ("--user", user, "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
        if spec.runtime == "podman":
            yield from ("--userns", "keep-id:uid={},gid={}".format(*user.split(":")))
        if spec.read_only_root:
            yield "--read-only"
        for path in names.SCRATCH.values():
            yield from ("--tmpfs", f"{path}:rw,exec,nosuid,nodev,mode=1777,size={names.mebibytes(spec.scratch_gib)}m")
        yield from ("--shm-size", f"{names.mebibytes(spec.shm_gib)}m")
        yield from _limits(job.spec)
        yield from ("--stop-timeout", str(math.ceil(launch.save_before_end_s) + STOP_MARGIN_S))
        if launch.retries:
            yield from ("--restart", f"on-failure:{launch.retries}")
        for variable, value in {**launch.environment, **_fixed(job.spec)}.items():
            yield from ("--env", f"{variable}={value}")
        for variable in sorted({s.env for s in job.spec.secrets.values()}):
            yield from ("--env", variable)
        spec_file = MountSpec(source=str(job.folder / "spec.yaml"), target=names.SPEC_FILE, read_only=True)
        for mount in (*launch.mounts, spec_file):
            yield from ("--mount", _mount(mount))
        yield from ("--entrypoint", "nrl", str(launch.image), *command(job)[1:])

    def _users(self, spec: ExperimentSpec) -> Iterator[str]:
        user = spec.launch.container.user or self._user
        if user.startswith("0:"):
            yield "`launch.container.user` is not set and you are root, who no container is run as; set it to `uid:gid` of whom `output` belongs to"


def _fixed(spec: ExperimentSpec) -> dict[str, str]:
    """Variables that the container gets whatever the spec says."""
    return {"HOME": names.HOME, "RAY_AUTH_MODE": spec.launch.auth}


def _limits(spec: ExperimentSpec) -> Iterator[str]:
    launch = spec.launch
    if launch.cpus_per_node is not None:
        yield from ("--cpus", str(launch.cpus_per_node))
    if launch.memory_gib_per_node is not None:
        yield from ("--memory", f"{names.mebibytes(launch.memory_gib_per_node)}m")
    if launch.accelerator == "gpu" and launch.container.runtime == "docker":
        yield from ("--gpus", str(launch.devices_per_node))
    elif launch.accelerator == "gpu":
        for device in range(launch.devices_per_node):
            yield from ("--device", f"nvidia.com/gpu={device}")


def _mount(mount: MountSpec) -> str:
    """The value of `--mount`, which the runtimes read as one line of CSV."""
    fields = [
        "type=bind",
        f"source={mount.source}",
        f"target={mount.target}",
        *(["readonly"] if mount.read_only else []),
    ]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _one_machine(spec: ExperimentSpec) -> Iterator[str]:
    launch = spec.launch
    if launch.nodes > 1:
        yield f"`launch.nodes` is {launch.nodes}, and a container runs on this machine alone; set it to 1, or submit to slurm or kubernetes"
    if launch.time_limit_min is not None:
        yield f"`launch.time_limit_min` is {launch.time_limit_min}, and {launch.container.runtime} ends no container by time; leave it out"


def _folders(spec: ExperimentSpec) -> Iterator[str]:
    mounts = spec.launch.mounts
    output = PurePosixPath(spec.output)
    inside = [
        m for m in mounts if PurePosixPath(m.target) in output.parents and not m.read_only and m.source == m.target
    ]
    if not output.is_absolute() or ".." in output.parts or not inside:
        yield (
            f"`output` is {spec.output!r}, which must be an absolute path below a folder that `launch.mounts` gives to the container under its own name, "
            "to write in: mount the folder above it with `source` equal to `target`"
        )
    own = [*names.SCRATCH.values(), names.SHM, names.SPEC_FOLDER]
    for mount in mounts:
        if mount.target == "/" or any(PurePosixPath(path).is_relative_to(mount.target) for path in own):
            yield f"`launch.mounts` has the target {mount.target!r}, which the job itself uses; choose another"


def _status(state: dict[str, object]) -> JobStatus:
    """From `.State` of docker's or podman's `inspect`."""
    word, code = str(state.get("Status", "")), int(str(state.get("ExitCode", 0)))
    if word in ("created", "configured", "initialized"):
        return JobStatus("queued", word)
    if word in ("running", "paused", "restarting", "stopping"):
        return JobStatus("running", word)
    if word not in ("exited", "dead", "removing", "stopped"):
        return JobStatus("unknown", word)
    why = f"{word} with {code}" + (", out of memory" if state.get("OOMKilled") else "")
    if code == SAVED:
        return JobStatus("cancelled", f"{why}: stopped after saving", code)
    return JobStatus("done" if code == 0 else "failed", why, code)


def _program(runtime: str) -> str:
    program = shutil.which(runtime)
    if program is None:
        raise SubmitError(
            f"`{runtime}` is not on this machine (PATH); install it, or submit elsewhere (`--to local`, `slurm`, `kubernetes`)"
        )
    return program


def _ask(runtime: str, *words: str, deadline_s: float = ASK_S) -> str:
    """What the runtime prints. Raises SubmitError with its words, or when it is silent too long."""
    try:
        done = subprocess.run(
            [_program(runtime), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SubmitError(f"`{runtime} {words[0]}` did not end within {deadline_s:g} s; is its daemon well?") from None
    if done.returncode != 0:
        raise SubmitError(f"`{runtime} {words[0]}` failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _is_gone(error: SubmitError) -> bool:
    return re.search(r"no such (container|object)|no container with name or ID", str(error), re.IGNORECASE) is not None


def _parse(job_id: str) -> tuple[str, str]:
    found = re.fullmatch(r"(docker|podman):([0-9a-f]{12,64})", job_id)
    if found is None:
        raise SubmitError(f"{job_id!r} is no container of a job; it reads docker:ID or podman:ID")
    return found.group(1), found.group(2)
