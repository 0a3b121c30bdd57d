"""One environment process as the framework sees it: started clean, called with a deadline, killed when it overruns."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.redaction import redacted
from nemo_rl_like.environment.types import EnvironmentContractError, Unscorable
from nemo_rl_like.environment.wire import Answer, Call, decode_answer, encode_call, frame, read_frame
from nemo_rl_like.spec.environment import EnvironmentSpec

log = logging.getLogger(__name__)

INHERITED = (
    *(
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "TMPDIR",
        "VIRTUAL_ENV",
        "TZ",
        "HF_HUB_OFFLINE",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    ),
    "NRL_RUN_ID",
)
"""Variables that an environment process gets; the run's secrets and proxies are not among them. `NRL_RUN_ID` marks it as the run's."""
_TAIL_LINES = 20
_KILL_WAIT_S = 10.0


class ProcessEnded(Unscorable):
    """The process was killed (reason `timeout`) or died (reason `crash`) during a call; all its episodes are lost."""


class EnvironmentProcess:
    """A running `environment.worker`. Calls go one at a time, so a deadline measures one call and not its queue."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lock = asyncio.Lock()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._drain = asyncio.create_task(self._read_stderr())

    @classmethod
    async def start(
        cls, spec: EnvironmentSpec, *, extra_env: Mapping[str, str], timeout_s: float
    ) -> EnvironmentProcess:
        """Start a process and wait until it has made its source.

        The process dies with the thread that runs this event loop, so the loop must live as long as the process is wanted.

        Raises:
            InputError: the source could not be made, or not within `timeout_s`; with the process's last lines.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "nemo_rl_like.environment.worker",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_clean_environment(extra_env),
            start_new_session=True,
        )
        self = cls(process)
        try:
            await self._exchange(spec.model_dump_json().encode(), timeout_s)
        except EnvironmentContractError as error:
            await self.kill()
            raise InputError(str(error)) from error
        except ProcessEnded as error:
            raise InputError(f"the environment process did not start within {timeout_s:.0f} s: {error}") from error
        return self

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def call(self, call: Call, timeout_s: float) -> Answer:
        """Make one call.

        Raises:
            ProcessEnded: it took longer than `timeout_s` seconds and the process was killed, or the process died.
            Unscorable: the environment could not answer; the process lives on.
            EnvironmentContractError: the environment broke its contract.
        """
        async with self._lock:
            return await self._exchange(encode_call(call), timeout_s)

    async def kill(self) -> None:
        """Kill the process and what it started, and wait for its end."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("environment process %d was already gone", self._process.pid)
        await asyncio.wait_for(self._process.wait(), _KILL_WAIT_S)
        await asyncio.wait_for(self._drain, _KILL_WAIT_S)

    async def _exchange(self, payload: bytes, timeout_s: float) -> Answer:
        try:
            answer = await asyncio.wait_for(self._send_and_read(payload), timeout_s)
        except TimeoutError as error:
            await self.kill()
            raise ProcessEnded("timeout", f"no answer within {timeout_s:g} s; process {self.pid} was killed") from error
        if answer is None:
            await self.kill()
            tail = " | ".join(self._tail) or "it printed nothing"
            raise ProcessEnded("crash", f"process {self.pid} ended with code {self._process.returncode}: {tail}")
        return decode_answer(answer)

    async def _send_and_read(self, payload: bytes) -> bytes | None:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        try:
            self._process.stdin.write(frame(payload))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            return None
        return await read_frame(self._process.stdout)

    async def _read_stderr(self) -> None:
        if self._process.stderr is None:
            raise RuntimeError("the process was started without pipes")
        while chunk := await self._process.stderr.read(4096):
            for line in chunk.decode(errors="replace").splitlines():
                log.debug("environment process %d: %s", self._process.pid, line)
                self._tail.append(redacted(line))


def _clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}
