"""What a Slurm of the tests keeps its accounts in: a MariaDB and a slurmdbd of our own. No service of the system is started."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAMS = ("mariadbd", "mariadb-install-db", "mariadb", "slurmdbd", "sacct", "sacctmgr")
ACCOUNT, QOS = "research", "urgent"
"""The account, and a quality of service beside `normal`."""
DATABASE = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=accounts
"""
CONF = """
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,qos
"""
_START_S = 60.0


def configure(folder: Path, host: str, user: str, database_port: int, port: int) -> str:
    """Write slurmdbd's file; returns the lines of slurm.conf."""
    (folder / "database.password").write_text(secrets.token_hex(16))
    path = folder / "slurmdbd.conf"
    path.touch(mode=0o600)
    password = (folder / "database.password").read_text()
    values = {"host": host, "user": user, "port": port, "database_port": database_port, "password": password}
    path.write_text(DATABASE.format(folder=folder, **values))
    return CONF.format(folder=folder, port=port).strip()


def database(folder: Path, port: int) -> Sequence[str]:
    """Make an empty database; the command that serves it."""
    data = folder / "database"
    user = [f"--user={os.environ.get('USER', 'root')}"] if os.getuid() == 0 else []
    words = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=socket"]
    _run([*words, "--skip-test-db", *user])
    files = [f"--socket={data}/socket", f"--pid-file={data}/pid", "--innodb-buffer-pool-size=64M"]
    where = [f"--port={port}", "--bind-address=127.0.0.1", "--innodb-lock-wait-timeout=900"]
    return ("mariadbd", "--no-defaults", f"--datadir={data}", *files, *where, *user)


def fill(folder: Path) -> None:
    """Once the database answers: slurmdbd's own part of it."""
    password = (folder / "database.password").read_text()
    users = "'slurm'@'127.0.0.1', 'slurm'@'localhost'"
    made = ", ".join(f"{name.strip()} identified by '{password}'" for name in users.split(","))
    statements = f"create database accounts; create user {made}; grant all on accounts.* to {users}"
    client = ["mariadb", "--no-defaults", f"--socket={folder}/database/socket"]
    _retried([*client, "--execute=select 1"])
    _run([*client, f"--execute={statements}"])


def register(environ: Mapping[str, str]) -> None:
    """Once slurmdbd answers: the cluster, its account, and the user of the tests in it."""
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    ask = ["sacctmgr", "--immediate", "--quiet"]
    _retried([*ask, "add", "cluster", "sim"], environ)
    _run([*ask, "add", "qos", QOS], environ)
    _run([*ask, "add", "account", ACCOUNT, "cluster=sim"], environ)
    _run([*ask, "add", "user", user, f"account={ACCOUNT}", f"qos=normal,{QOS}", "defaultqos=normal"], environ)


def _run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_START_S, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)


def _retried(command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            return _run(command, environ)
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
