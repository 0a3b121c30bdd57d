"""A real tritonserver on CPUs, from the wheel of nvidia-pytriton: its own process, ports and shared memory, and clients for it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SITE = Path(sysconfig.get_path("platlib"))
SERVER = SITE / "pytriton" / "tritonserver"
NUMPY = Path(sys.prefix) / "triton"
"""NumPy 1.26 alone (`make install-test`): the wheel's Python stub was built for NumPy 1 and gives arrays of NumPy 2 wrong strides."""
_count = itertools.count()


@dataclass(frozen=True)
class Triton:
    """Where a running server listens."""

    http: int
    grpc: int
    log: Path

    def get(self, path: str) -> Any:
        """The JSON at a path, by HTTP."""
        return self._ask(path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers a JSON body."""
        return json.loads(self._ask(path, body))

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The JSON of each server-sent event."""
        lines = self._ask(path, body).decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", data, timeout=120) as response:
            found: bytes = response.read()
        return found


@contextmanager
def triton(
    repository: Path, scratch: Path, backends: Mapping[str, Path] | None = None, timeout_s: float = 240
) -> Iterator[Triton]:
    """A server on the repository, with further Python-based backends by name; raises RuntimeError with its log if it does not get ready."""
    scratch.mkdir(parents=True, exist_ok=True)
    ports, log = [free_port() for _ in range(3)], scratch / "triton.log"
    with log.open("wb") as out:
        command = _command(repository, _backends(scratch, backends or {}), ports)
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
    try:
        _await_ready(process, ports[0], log, timeout_s)
        yield Triton(ports[0], ports[1], log)
    finally:
        _end(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _backends(scratch: Path, more: Mapping[str, Path]) -> Path:
    """The wheel's Python backend with the stub of this Python, and a folder with `model.py` for each further one."""
    folder = scratch / "backends"
    shutil.copytree(SERVER / "backends" / "python", folder / "python")
    stub = (
        SERVER
        / "python_backend_stubs"
        / f"{sys.version_info.major}.{sys.version_info.minor}"
        / "triton_python_backend_stub"
    )
    shutil.copyfile(stub, folder / "python" / stub.name)
    (folder / "python" / stub.name).chmod(0o755)
    utilities = folder / "python" / "triton_python_backend_utils.py"  # what the stub imports first; it does not read PYTHONPATH
    utilities.write_text(f"import sys\n\nsys.path.insert(0, {str(NUMPY)!r})\n" + utilities.read_text())
    for name, source in more.items():
        (folder / name).mkdir()
        shutil.copyfile(source, folder / name / "model.py")
    return folder


def _command(repository: Path, backends: Path, ports: list[int]) -> list[str]:
    http, grpc, metrics = map(str, ports)
    options = {
        "model-repository": str(repository),
        "backend-directory": str(backends),
        "http-address": "127.0.0.1",
        "http-port": http,
        "grpc-address": "127.0.0.1",
        "grpc-port": grpc,
        "metrics-port": metrics,
        "allow-gpu-metrics": "false",
        "exit-on-error": "true",
        "exit-timeout-secs": "10",
        "backend-config": f"python,shm-region-prefix-name=nrl_{os.getpid()}_{next(_count)}_",
    }
    patience = "--backend-config=python,stub-timeout-seconds=120"
    return [str(SERVER / "bin" / "tritonserver"), *(f"--{name}={value}" for name, value in options.items()), patience]


def _environment() -> dict[str, str]:
    assert (NUMPY / "numpy").is_dir(), f"{NUMPY} has no numpy; run `make install-test`"
    libraries = f"{SITE / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
    return {
        **os.environ,
        "LD_LIBRARY_PATH": libraries,
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _await_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"tritonserver ended with exit code {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(f"tritonserver was not ready after {timeout_s} s:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and after a while SIGKILL, to the server and its stubs."""
    for sign, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
    process.wait(1)
