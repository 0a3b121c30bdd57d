"""The job script for Slurm: one `srun nrl node`, a word to it before its end, and the decision whether to start again."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_like.artifacts.errors import StoppedBySignal
from nemo_rl_like.launch.local import CANCELLED
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.hosts import HostGroup

NAME = "job.sh"
_SAFE_PATH = re.compile(r"/[\w./@+=:-]*", re.ASCII)
"""Paths that stand in directives and in pyxis' mounts as they are."""

_BODY = """
set -uo pipefail
spec={spec}
failures={failures}
stop={stop}
cancelled={cancelled}
rm -f "$stop"

# Slurm itself starts a job again that it preempts, or whose host fails, while it is being cancelled.
[[ -e $cancelled ]] && exit {saved}

# A signal to the step may reach every process in it; the file reaches the driver alone, which saves.
trap 'touch "$stop"' USR1
srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none{groups}{container} \\
  {node} node "$spec" --stop-file "$stop"{until} &
step=$!

while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done

# {saved}: it saved because it was told to. 2: the spec or an input is wrong, so another start would end the same way.
if [[ -e $cancelled || $code == 0 || $code == 2 ]]; then
  exit "$code"
fi
if [[ $code != {saved} ]]; then
  printf x >>"$failures"
  if [[ $(wc -c <"$failures") -gt {retries} ]]; then
    exit "$code"
  fi
fi
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
"""


def problems(job: Job) -> list[str]:
    """What Slurm cannot honour of the job, or what its script cannot hold."""
    launch, slurm = job.spec.launch, job.spec.launch.slurm
    found = []
    for field, path in (("output", job.folder), ("the working folder", job.working_folder)):
        if not _SAFE_PATH.fullmatch(str(path)):
            found.append(
                f"{field} leads to {str(path)!r}, and a Slurm script takes letters, digits and ./@+=:_- in paths; choose another"
            )
        elif launch.image is not None and (":" in str(path) or ".." in path.parts):
            found.append(f"{field} leads to {str(path)!r}, which the container mounts; write it without `:` and `..`")
    if launch.image is None and launch.mounts:
        found.append(
            "`launch.mounts` is given without `launch.image`: no container sees them; leave them out, or name an image"
        )
    for mount in launch.mounts:
        if any(":" in path or "," in path for path in (mount.source, mount.target)):
            found.append(
                f"`launch.mounts` has {mount.source!r} at {mount.target!r}, and pyxis takes no `:` or `,` in a path; choose another"
            )
    generation = launch.generation.gres_type if launch.generation is not None else None
    for field, kind in (("slurm", slurm.gres_type), ("generation", generation)):
        if kind is not None and launch.accelerator == "cpu":
            found.append(
                f"`launch.{field}.gres_type` is {kind}, and the job has no GPUs (`launch.accelerator: cpu`); leave it out"
            )
    if slurm.mail_type and slurm.mail_user is None:
        found.append("`launch.slurm.mail_type` is given without `mail_user`; name who is written to")
    return found


def script(job: Job) -> str:
    """The whole script; a pure function of the job."""
    launch = job.spec.launch
    parts = [_directives(job, group) for group in launch.groups]
    directives = "#SBATCH hetjob\n".join("".join(f"#SBATCH --{line}\n" for line in part) for part in parts)
    task = "-${SLURM_ARRAY_TASK_ID}" if job.seeds else ""
    folder = shlex.quote(str(job.folder))
    until = f" --until {shlex.quote(job.until)}" if job.until is not None else ""
    body = _BODY.format(
        spec=f"{folder}/seed{task}.yaml" if job.seeds else f"{folder}/spec.yaml",
        failures=f"{folder}/failures{task}",
        stop=f"{folder}/stop{task}",
        cancelled=f"{folder}/{CANCELLED}{task}",
        groups=f" --het-group={','.join(map(str, range(len(parts))))}" if len(parts) > 1 else "",
        container="".join(f" \\\n  {shlex.quote(flag)}" for flag in _container(job)),
        node="nrl" if launch.image is not None else f"{shlex.quote(sys.executable)} -m nemo_rl_like",
        until=until,
        saved=StoppedBySignal.exit_code,
        retries=launch.retries,
    )
    return f"#!/bin/bash\n{directives}{body}"


def _directives(job: Job, group: HostGroup) -> Iterator[str]:
    """Of one group of hosts; what the job as a whole asks for stands in the first."""
    yield f"job-name={job.name}"
    yield from _hosts(job, group)
    if group.role == "train":
        yield from _batch(job)
    else:
        yield "requeue"
    yield from _places(job, group)


def _hosts(job: Job, group: HostGroup) -> Iterator[str]:
    launch = job.spec.launch
    yield f"nodes={group.nodes}"
    yield "ntasks-per-node=1"
    if launch.accelerator == "gpu":
        kind = "" if group.gres_type is None else f"{group.gres_type}:"
        yield f"gres=gpu:{kind}{group.devices_per_node}"
    if group.cpus_per_node is not None:
        yield f"cpus-per-task={group.cpus_per_node}"
    if group.memory_gib_per_node is not None:
        yield f"mem={max(1, round(group.memory_gib_per_node * 1024))}M"  # 0 means all
    if launch.time_limit_min is not None:
        yield f"time={launch.time_limit_min}"


def _batch(job: Job) -> Iterator[str]:
    """What concerns the script itself."""
    slurm = job.spec.launch.slurm
    log = "log-%a.txt" if job.seeds else "log.txt"
    yield f"signal=B:USR1@{round(job.spec.launch.save_before_end_s)}"
    yield from ("requeue", "open-mode=append", f"output={job.folder}/{log}", f"chdir={job.working_folder}")
    if job.after is not None:
        yield from (f"dependency=afterok:{job.after}", "kill-on-invalid-dep=yes")
    if job.seeds:
        yield f"array={','.join(map(str, job.seeds))}"
    if slurm.comment is not None:
        yield f'comment="{slurm.comment}"'
    if slurm.mail_user is not None:
        yield f"mail-user={slurm.mail_user}"
    if slurm.mail_type:
        yield f"mail-type={','.join(slurm.mail_type)}"


def _places(job: Job, group: HostGroup) -> Iterator[str]:
    slurm = job.spec.launch.slurm
    asked = {
        "partition": group.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": group.constraint,
        "exclude": slurm.exclude,
    }
    yield from (f"{field}={value}" for field, value in asked.items() if value is not None)
    if slurm.exclusive:
        yield "exclusive"


def _container(job: Job) -> Iterator[str]:
    """Flags of pyxis for srun: the image, the folders that the job needs at their own paths, and those that the spec names."""
    launch = job.spec.launch
    if launch.image is None:
        return
    own = [str(path) for path in dict.fromkeys((job.working_folder, job.folder.parent, Path(job.spec.output).parent))]
    targets = {mount.target for mount in launch.mounts}
    mounts = [f"{m.source}:{m.target}{':ro' if m.read_only else ''}" for m in launch.mounts]
    mounts += [f"{path}:{path}" for path in own if path not in targets]
    yield f"--container-image={launch.image}"
    yield f"--container-mounts={','.join(mounts)}"
    yield "--no-container-mount-home"
    yield f"--container-workdir={job.working_folder}"
