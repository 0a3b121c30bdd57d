"""A real Slurm of four hosts on this one: munged, slurmctld and four slurmd of our own, in a folder of our own, with a double of pyxis; with accounts
also MariaDB and slurmdbd."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tests.launch import slurm_accounts

NODES = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "gcc")
ADDRESSES = {f"node{i}": f"127.0.0.{i + 1}" for i in range(1, NODES + 1)}
"""Each host has a loopback address of its own."""
CONF = """
ClusterName=sim
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_min_interval=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
{accounts}
MailProg=/bin/true
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SlurmdTimeout=20
{nodes}
PartitionName=batch Nodes=node[1-{last}] Default=YES MaxTime=24:00:00 DefMemPerCPU=200 State=UP
PartitionName=urgent Nodes=node[1-{last}] MaxTime=24:00:00 DefMemPerCPU=200 State=UP PriorityTier=10
PartitionName=spare Nodes=node[1-{last}] MaxTime=24:00:00 DefMemPerCPU=200 State=UP GraceTime=60
PartitionName=ended Nodes=node[1-{last}] MaxTime=24:00:00 DefMemPerCPU=200 State=UP PreemptMode=CANCEL
PartitionName=early Nodes=node[1-2] MaxTime=24:00:00 DefMemPerCPU=200 State=UP
PartitionName=late Nodes=node[3-{last}] MaxTime=24:00:00 DefMemPerCPU=200 State=UP
"""


NO_ACCOUNTS = "JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none"
Tracking = Literal["linuxproc", "pgid"]
"""`linuxproc`: a signal reaches every process below the task that Slurm started. `pgid`: that task and what shares its process group; of a job of
ours the task alone, as with `proctrack/cgroup`, which clusters have and which needs a host's cgroups.
"""
_JOBS_END_S = 40.0
"""A little more than `KillWait`, after which Slurm kills what heard no SIGTERM."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster. Commands that have `environ` talk to it."""

    folder: Path
    environ: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]]
    """Children of this process by name, in the order of their start."""

    def call(self, *command: str) -> str:
        """What a command prints."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of a job by `scontrol`."""
        words = self.call("scontrol", "-o", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def states(self, job_id: str) -> list[str]:
        """State of each group of a job's hosts."""
        lines = self.call("scontrol", "-o", "show", "job", job_id).splitlines()
        return [line.split("JobState=")[1].split()[0] for line in lines]

    def wait(self, job_id: str, *states: str, seconds: float = 240.0) -> dict[str, str]:
        """Wait until a job is in one of the states; its fields."""
        end = time.monotonic() + seconds
        while (found := self.job(job_id))["JobState"] not in states:
            assert time.monotonic() < end, found
            time.sleep(0.2)
        return found

    def ended(self, job_id: str, seconds: float = 240.0) -> dict[str, str]:
        """Wait until a job has ended; its fields."""
        return self.wait(job_id, "COMPLETED", "FAILED", "CANCELLED", seconds=seconds)

    def forget_jobs(self) -> None:
        """slurmctld starts anew and knows no job, as if `MinJobAge` were over."""
        _ended(self.daemons.pop("slurmctld"))
        self.daemons["slurmctld"] = _start(self.folder, self.environ, ("slurmctld", "-D", "-c"))
        self.call("squeue")  # it waits until slurmctld answers

    def lose_host(self, name: str) -> None:
        """Everything of a host is gone at once: slurmd, and what it started for jobs. slurmctld finds out after `SlurmdTimeout`."""
        victims = [self.daemons.pop(name).pid]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                environ = process.environ()
                mine = environ.get("SLURM_CONF") == self.environ["SLURM_CONF"]
                if mine and (environ.get("SLURMD_NODENAME") == name or f"-N {name}" in " ".join(process.cmdline())):
                    victims.append(process.pid)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def return_host(self, name: str) -> None:
        """A host that was lost is back."""
        self.daemons[name] = _start(self.folder, self.environ, ("slurmd", "-D", "-N", name))
        _wait_until_idle(self)


@contextmanager
def running(folder: Path, *, accounts: bool = False, tracking: Tracking = "linuxproc") -> Iterator[Cluster]:
    """The cluster, until the end of the block. Its daemons are children of this process, in the foreground.

    `accounts`: it keeps them in a slurmdbd, which knows the account `research` and takes no job of another. `tracking`: how it knows the
    processes of a job, and with that which of them a signal reaches.
    """
    programs = (*PROGRAMS, *(slurm_accounts.PROGRAMS if accounts else ()))
    missing = [name for name in programs if shutil.which(name, path=_path()) is None]
    assert not missing, f"not installed: {', '.join(missing)}; run `make install-system`"
    ports = _free_ports(NODES + 3)
    _write_conf(folder, ports, accounts=accounts, tracking=tracking)
    environ = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path(), "HOME": str(folder), "LANG": "C.UTF-8"}
    environ |= {
        name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE") if name in os.environ
    }
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    try:
        daemons["munged"] = _start(folder, environ, _munged(folder))
        _wait_for(folder / "munge.socket")
        if accounts:
            daemons["mariadbd"] = _start(folder, environ, slurm_accounts.database(folder, ports[-2]))
            slurm_accounts.fill(folder)
            daemons["slurmdbd"] = _start(folder, environ, ("slurmdbd", "-D"))
            slurm_accounts.register(environ)
        daemons["slurmctld"] = _start(folder, environ, ("slurmctld", "-D"))
        for name in ADDRESSES:
            daemons[name] = _start(folder, environ, ("slurmd", "-D", "-N", name))
        cluster = Cluster(folder, environ, daemons)
        _wait_until_idle(cluster)
        yield cluster
    finally:
        _end_jobs(environ)
        for process in reversed(daemons.values()):
            _ended(process)


def _end_jobs(environ: dict[str, str]) -> None:
    """What a test that failed left running, which would outlive slurmd."""
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(["scancel", "--user", user], env=environ, capture_output=True, timeout=20, check=False)
        end = time.monotonic() + _JOBS_END_S
        while subprocess.run(["squeue", "-h"], env=environ, capture_output=True, timeout=20, check=False).stdout:
            if time.monotonic() > end:
                return
            time.sleep(0.2)


def _start(folder: Path, environ: dict[str, str], command: Sequence[str]) -> subprocess.Popen[bytes]:
    with (folder / "daemons.log").open("ab") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _write_conf(folder: Path, ports: Sequence[int], *, accounts: bool, tracking: Tracking) -> None:
    folder.chmod(0o755)
    for name in ("state", "spool", "dev"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    host = socket.gethostname().partition(".")[0]
    gres = " Gres=gpu:h100:8" if _make_gpus(folder) else ""
    size = f"CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000{gres} State=UNKNOWN"
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} {size}"
        for (name, address), port in zip(ADDRESSES.items(), ports[1 : NODES + 1], strict=True)
    )
    plugin = folder / "pyxis.so"
    source = Path(__file__).with_name("pyxis_double.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(plugin), str(source)], check=True)
    (folder / "plugstack.conf").write_text(f"required {plugin}\n")
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    kept = slurm_accounts.configure(folder, host, user, *ports[-2:]) if accounts else NO_ACCOUNTS
    places = {"host": host, "folder": folder, "port": ports[0], "nodes": nodes, "last": NODES}
    text = CONF.format(**places, user=user, accounts=kept, tracking=tracking)
    (folder / "slurm.conf").write_text(text)


def _make_gpus(folder: Path) -> bool:
    """Device files that stand for GPUs; only root may make them."""
    if os.getuid() != 0:
        return False
    for i in range(8):
        os.mknod(folder / "dev" / f"gpu{i}", 0o20666, os.makedev(1, 3))
    line = f"NodeName=node[1-{NODES}] Name=gpu Type=h100 Count=8 File={folder}/dev/gpu[0-7]\n"
    (folder / "gres.conf").write_text(line)
    return True


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in range(6817, 11000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


def _munged(folder: Path) -> Sequence[str]:
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    return ("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def _wait_until_idle(cluster: Cluster) -> None:
    end = time.monotonic() + 60
    while cluster.call("sinfo", "-h", "-p", "batch", "-o", "%T %D").strip() != f"idle {NODES}":
        assert time.monotonic() < end, (cluster.folder / "daemons.log").read_text()[-2000:]
        time.sleep(0.1)


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
