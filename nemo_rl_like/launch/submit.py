"""Submits experiments, and tells how their jobs are: what `nrl submit`, `status`, `logs`, `cancel` and `resubmit` do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_like.artifacts.errors import SpecError, SubmitError
from nemo_rl_like.launch import layouts, registry, submission
from nemo_rl_like.launch.node import token
from nemo_rl_like.launch.submission import Record, Submission
from nemo_rl_like.launch.target import Job, JobStatus, Rendered, Target
from nemo_rl_like.pipeline.records import now
from nemo_rl_like.pipeline.wiring import check_until, wire
from nemo_rl_like.spec.experiment import ExperimentSpec, stage_name
from nemo_rl_like.spec.loader import load_spec, resolved_yaml

_LIVE = ("queued", "running")
_POLL_S = 2.0
_DRY_FOLDER = "0000"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be submitted."""

    spec: ExperimentSpec
    """The experiment; its `output` may be relative to the working folder."""
    target: str
    """Name of the target."""
    working_folder: Path
    """Folder that relative paths in the spec start from, absolute."""
    seeds: tuple[int, ...] = ()
    """One run a seed, each in an output folder of its own; none: the spec's own seed."""
    stages_as_jobs: bool = False
    """One job a stage, each waiting for the one before."""
    until: str | None = None
    """Last stage to run; None: all."""
    after: str | None = None
    """Id of a job to wait for."""


def submit(request: Request) -> list[Submission]:
    """Check, render and start the jobs of a request; one submission a job.

    Raises SpecError naming every field that the target cannot honour, SubmitError when the target refuses, or a submission of the
    same output still runs. A chain that breaks off leaves the jobs before the break submitted; the error names them.
    """
    made: list[Submission] = []
    for part in _parts(request):
        after = made[-1].record.job_id if request.stages_as_jobs and made else part.after
        try:
            made.append(_submit_one(replace(part, after=after), chained=bool(made) and request.stages_as_jobs))
        except SubmitError as error:
            if not made:
                raise
            before = ", ".join(f"{one.folder} as {one.record.job_id}" for one in made)
            raise SubmitError(f"{error}; submitted before that: {before}") from error
    return made


def dry_run(
    request: Request, show: Callable[[Job, Rendered], None] = lambda job, rendered: None
) -> list[tuple[Job, Rendered]]:
    """What `submit` would write and start, checked by the target itself; nothing is left behind. Errors as in `submit`.

    `show` gets each job before the target sees it, so that it can be read where there is no such cluster.
    """
    found = []
    target = registry.target(request.target)
    for part in _parts(request):
        job = _job(part, submission.jobs_folder(_output(part)) / _DRY_FOLDER)
        _refuse_problems(target, job)
        rendered = target.render(job)
        found.append((job, replace(rendered, files=_specs(job) | dict(rendered.files))))
        show(*found[-1])
        target.dry_run(job, rendered)
    return found


def status(run: Path) -> tuple[Submission, JobStatus]:
    """The newest submission of a run, and how far its job is. Raises OutputFolderError, SubmitError."""
    found = submission.find(run)
    return found, registry.target(found.record.target).status(found.record.job_id, found.folder)


def wait(one: Submission) -> JobStatus:
    """Wait until the job has ended."""
    target = registry.target(one.record.target)
    while (found := target.status(one.record.job_id, one.folder)).state in _LIVE:
        time.sleep(_POLL_S)
    return found


def resubmit(run: Path) -> list[Submission]:
    """Submit what was submitted last once more; the run goes on where it was. Errors as in `submit`."""
    found = submission.find(run)
    record = found.record
    first = f"seed-{record.seeds[0]}.yaml" if record.seeds else submission.SPEC
    spec = load_spec(found.folder / first)
    spec = spec.model_copy(update={"output": str(submission.output_of(found.folder))})
    request = Request(spec, record.target, Path(record.working_folder), record.seeds, until=record.until)
    return submit(request)


def _parts(request: Request) -> list[Request]:
    """The request as requests of one job each. Raises SpecError for a pipeline that no stage order makes sense of, and for options that contradict."""
    entry = registry.entry(request.target)
    check_until(request.spec, request.until)
    stages = [stage.name for stage in wire(request.spec)]
    if request.until is not None:
        stages = stages[: stages.index(request.until) + 1]
    if request.stages_as_jobs and not entry.chains:
        raise SpecError(
            f"--stages-as-jobs: target {request.target} has no jobs that wait for others; submit to slurm, or leave it out"
        )
    if request.seeds and request.stages_as_jobs:
        raise SpecError(
            "--seeds and --stages-as-jobs exclude each other: a task would wait for another seed's; submit seeds one by one"
        )
    if len(set(request.seeds)) != len(request.seeds):
        raise SpecError(f"--seeds names one twice: {','.join(map(str, request.seeds))}; name each once")
    parts = [request]
    if request.stages_as_jobs:
        parts = [replace(request, until=stage) for stage in stages]
    if request.seeds and (not entry.arrays or request.spec.launch.generation is not None):
        parts = [replace(request, spec=_of_seed(request, seed), seeds=()) for seed in request.seeds]
    return parts


def _output(request: Request) -> Path:
    return request.working_folder / request.spec.output


def _of_seed(request: Request, seed: int) -> ExperimentSpec:
    output = submission.seed_output(_output(request), seed)
    return request.spec.model_copy(update={"seed": seed, "output": str(output)})


def _job(request: Request, folder: Path) -> Job:
    name = re.sub(r"[^A-Za-z0-9-]+", "-", request.spec.name).strip("-")[:48] or "experiment"
    spec = request.spec.model_copy(update={"output": str(_output(request))})
    return Job(name, spec, folder, request.working_folder, request.until, request.after, request.seeds)


def _specs(job: Job) -> dict[str, str]:
    """The resolved spec, or one a seed, by file name."""
    if not job.seeds:
        return {submission.SPEC: resolved_yaml(job.spec)}
    outputs = {seed: str(submission.seed_output(Path(job.spec.output), seed)) for seed in job.seeds}
    return {
        f"seed-{seed}.yaml": resolved_yaml(job.spec.model_copy(update={"seed": seed, "output": output}))
        for seed, output in outputs.items()
    }


def _submit_one(request: Request, *, chained: bool) -> Submission:
    target = registry.target(request.target)
    _refuse_problems(target, _job(request, submission.jobs_folder(_output(request)) / _DRY_FOLDER))
    with submission.numbered(_output(request)) as folder:
        if not chained:
            _refuse_live(_output(request))
        job = _job(request, folder)
        rendered = target.render(job)
        submission.write_files(folder, _specs(job) | dict(rendered.files))
        if registry.entry(request.target).token_file and job.spec.launch.hosts > 1 and job.spec.launch.auth == "token":
            token.make(folder)
        record = Record(
            target=request.target,
            job_id=target.submit(job, rendered),
            command=rendered.command,
            submitted=now(),
            working_folder=str(request.working_folder),
            until=request.until,
            after=request.after,
            seeds=request.seeds,
        )
        try:
            submission.write_record(folder, record)
        except OSError:
            target.cancel(record.job_id, folder)  # nobody would find it
            raise
    return Submission(folder, record)


def _refuse_live(output: Path) -> None:
    for one in submission.submissions(output):
        found = registry.target(one.record.target).status(one.record.job_id, one.folder)
        if found.state in _LIVE:
            raise SubmitError(
                f"output folder {output} has a submission that is {found.state} ({one.folder}, {one.record.target} job "
                f"{one.record.job_id}); wait for it, end it with `nrl cancel {one.folder}`, or set `output` to another folder"
            )


def _refuse_problems(target: Target, job: Job) -> None:
    problems = [*_common_problems(job), *_engine_problems(job, target), *target.problems(job)]
    if problems:
        raise SpecError(f"target {target.name} cannot run this job:\n" + "\n".join(f"- {text}" for text in problems))


def _common_problems(job: Job) -> list[str]:
    """What no target can honour."""
    spec, launch = job.spec, job.spec.launch
    found = []
    devices = launch.nodes * launch.devices_per_node
    own = {f"stages.{stage_name(s)}.settings.": s.settings for s in spec.stages if s.settings is not None}
    for where, policy in {"": spec.policy, **{where: settings.policy for where, settings in own.items()}}.items():
        if policy is not None and policy.layout.ranks > devices:
            found.append(
                f"`{where}policy.layout` asks for {policy.layout.ranks} ranks, and the job has {devices} devices (`launch.nodes` x "
                "`launch.devices_per_node`); raise them, or make dp * pp * cp * tp smaller"
            )
    found += layouts.problems(spec, job.working_folder)
    if spec.cluster.address is not None:
        found.append(
            f"`cluster.address` is {spec.cluster.address}, and the job makes a cluster of its own; leave it out"
        )
    return found


def _engine_problems(job: Job, target: Target) -> Iterator[str]:
    """Replicas that no host can hold, and hosts that generate where nothing can stand on them."""
    engine, launch = job.spec.engine, job.spec.launch
    group, parts, on_gpus = launch.groups[-1], engine.tensor_parallel, launch.accelerator == "gpu"
    if on_gpus and parts > group.devices_per_node:
        yield (
            f"`engine.tensor_parallel` is {parts}, and a host has {group.devices_per_node} devices (`{group.field}.devices_per_node`): "
            "a replica stands on one host; make it smaller, and raise `engine.replicas`"
        )
    if launch.generation is None:
        return
    if not registry.entry(target.name).groups:
        yield f"`launch.generation` is given, and target {target.name} has hosts of one kind; leave it out, or submit to slurm"
    if engine.kind == "embedded":
        yield (
            "`launch.generation` is given, and `engine.kind` is embedded, which samples on the hosts that train; set `engine.kind: vllm`, or leave it out"
        )
    elif on_gpus and engine.replicas * parts > group.devices:
        yield (
            f"`engine` asks for {engine.replicas * parts} devices (`replicas` x `tensor_parallel`), and the hosts that generate have {group.devices} "
            "(`launch.generation.nodes` x `devices_per_node`); raise them, or lower `engine.replicas`"
        )
