"""A real tritonserver on CPUs, from the wheel of nvidia-pytriton: a process, ports and shared memory of its own, and clients for it.

The wheel's Python stub (Triton 2.51) was built for NumPy 1 and gives arrays wrong strides where NumPy 2 is loaded. It reads no PYTHONPATH; its packages are those of
the virtual environment whose `python3` is first on PATH. So it gets an environment with NumPy 1.26 before the packages of this one.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = Path(sysconfig.get_path("platlib"))
SERVER = SITE / "pytriton" / "tritonserver"
NUMPY = Path(sys.prefix) / "triton"
"""NumPy 1.26 alone (`make install-test`)."""
_count = itertools.count()


@dataclass(frozen=True)
class Triton:
    """Where a running server listens."""

    http: int
    grpc: int

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers a JSON body."""
        return json.loads(self._ask(path, body))

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The JSON of each server-sent event."""
        lines = self._ask(path, body).decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    def _ask(self, path: str, body: Mapping[str, Any]) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as response:
            found: bytes = response.read()
        return found


@contextmanager
def triton(
    repository: Path,
    scratch: Path,
    backends: Mapping[str, Path] | None = None,
    *,
    completes: bool = True,
    numpy: Path = NUMPY,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240,
) -> Iterator[Triton]:
    """A server on the repository, with further Python-based backends by name; raises RuntimeError with its log if it does not get ready.

    Unless it `completes` configurations, a `config.pbtxt` must be whole, and models are loaded once, not twice.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    ports, log = [free_port() for _ in range(3)], scratch / "triton.log"
    memory = f"nrl_{os.getpid()}_{next(_count)}_"
    command = _command(repository, _backends(scratch, backends or {}), ports, memory, completes)
    environment = {**os.environ, **(env or {}), **_environment(_prefix(scratch / "python", numpy))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _await_ready(process, ports[0], log, timeout_s)
        yield Triton(ports[0], ports[1])
    finally:
        _end(process)
        for left in Path("/dev/shm").glob(f"{memory}*"):
            left.unlink(missing_ok=True)


def _prefix(folder: Path, numpy: Path) -> Path:
    """A virtual environment of this one's packages, with those of `numpy` before them."""
    site = folder / "lib" / PYTHON / "site-packages"
    site.mkdir(parents=True)
    (site / "packages.pth").write_text(f"{numpy}\nimport site; site.addsitedir({str(SITE)!r})\n")
    home = Path(sys.base_prefix) / "bin"
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(home / PYTHON)
    (folder / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    return folder


def _backends(scratch: Path, more: Mapping[str, Path]) -> Path:
    """The wheel's Python backend with the stub of this Python, and a folder with `model.py` for each further one."""
    folder = scratch / "backends"
    shutil.copytree(SERVER / "backends" / "python", folder / "python")
    stub = SERVER / "python_backend_stubs" / PYTHON.removeprefix("python") / "triton_python_backend_stub"
    shutil.copyfile(stub, folder / "python" / stub.name)
    (folder / "python" / stub.name).chmod(0o755)
    for name, source in more.items():
        (folder / name).mkdir()
        shutil.copyfile(source, folder / name / "model.py")
    return folder


def _command(repository: Path, backends: Path, ports: list[int], memory: str, completes: bool) -> list[str]:
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
        "backend-config": f"python,shm-region-prefix-name={memory}",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    flags += [
        "--backend-config=python,stub-timeout-seconds=120",
        *([] if completes else ["--disable-auto-complete-config"]),
    ]
    return [str(SERVER / "bin" / "tritonserver"), *flags]


def _environment(prefix: Path) -> dict[str, str]:
    assert SERVER.is_dir() and (NUMPY / "numpy").is_dir(), (
        f"{SERVER} or {NUMPY}/numpy is missing; run `make install-test`"
    )
    return {
        "LD_LIBRARY_PATH": f"{SITE / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}",
        "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}",
    }


def _await_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"tritonserver ended with exit code {process.returncode}:\n{log.read_text()}")
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
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the stubs of a server that fell
