"""`WorkerHost`: the Ray actor that hosts services by name in one process.

Constructors and synchronous methods run one after another on the process's *service thread*, in the order in which one
caller submitted them; asynchronous methods run on the actor's event loop, beside them. So a collective meets the same
order on every rank, as long as only one caller at a time makes collective calls.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import logging
import os
import socket
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TextIO, runtime_checkable

import ray

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.ports import free_port
from nemo_rl_like.artifacts.redaction import redacting_handlers
from nemo_rl_like.cluster import last_words
from nemo_rl_like.cluster.context import Hosted, RankContext

logger = logging.getLogger(__name__)

_LIBRARY_WARNINGS = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"When using async grad allreduce it is recommended",
)
"""How the warnings begin that Megatron provokes in every run."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs."""

    pid: int
    """Process id."""
    node: str
    """Host name."""
    address: str
    """IP address of the host."""
    port: int
    """A TCP port that was free there."""
    log_start: int
    """Byte of the log file at which this process began to write."""
    oom_kills: int
    """Processes that the host's kernel had ended for lack of memory when this one started."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a service method; references anywhere in `args` (also inside lists, tuples and dicts) are fetched."""

    caller: str
    """Id of the handle that submitted it."""
    sequence: int
    """0, 1, .. in the caller's order for this rank."""
    service: str
    """Name of the service."""
    method: str
    """Name of the method."""
    args: tuple[object, ...]
    """Positional arguments."""


@runtime_checkable
class Closeable(Protocol):
    """A service that holds something which must be released."""

    def close(self) -> None:
        """Release it."""


class Turnstile:
    """Lets the calls of one caller through in their order, whatever the order in which they arrive."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Event] = {}

    async def enter(self, sequence: int) -> None:
        if sequence != self._next:
            self._waiting[sequence] = asyncio.Event()
            await self._waiting[sequence].wait()

    def leave(self) -> None:
        self._next += 1
        waiting = self._waiting.pop(self._next, None)
        if waiting is not None:
            waiting.set()


class ServiceThread:
    """Runs functions one after another in one thread.

    A daemon thread, unlike those of an executor: a worker that is told to exit does not wait for a service that hangs.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], object], Future[object]]] = SimpleQueue()
        threading.Thread(target=self._run, name="service", daemon=True).start()

    def run(self, function: Callable[[], object]) -> asyncio.Future[object]:
        """Queue a function; the result or exception arrives in the calling event loop."""
        future: Future[object] = Future()
        self._work.put((function, future))
        return asyncio.wrap_future(future)

    def _run(self) -> None:
        last_words.unblock_signals()
        while True:
            function, future = self._work.get()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
                future.set_exception(error)
            del function, future


class WorkerHost:
    """One process of a worker group."""

    def __init__(self, log_path: str) -> None:
        """Send this process's stdout and stderr to `log_path` (appended) from now on."""
        self._log_start = _capture_output(Path(log_path))
        self._oom_kills = last_words.oom_kills()
        last_words.install()
        self._thread = ServiceThread()
        self._services: dict[str, object] = {}
        self._turnstiles: defaultdict[str, Turnstile] = defaultdict(Turnstile)
        self._context: RankContext | None = None

    async def describe(self) -> WorkerInfo:
        """Where this process runs."""
        address = ray.util.get_node_ip_address()
        last_words.unblock_signals()  # for the processes that asynchronous methods start
        port = free_port(address)
        return WorkerInfo(os.getpid(), socket.gethostname(), address, port, self._log_start, self._oom_kills)

    async def configure(self, context: RankContext, env: Mapping[str, str]) -> None:
        """Tell the worker its place and set further environment variables (never part of Ray's own records)."""
        os.environ.update(env)
        self._context = context
        logger.info("%s rank %d of %d, process %d", context.group, context.rank, context.world_size, os.getpid())

    async def call(self, call: Call) -> tuple[None, object]:
        """Call a service. Two results: the first only says that it is done, so that waiting fetches no value."""
        turnstile = self._turnstiles[call.caller]
        await turnstile.enter(call.sequence)
        try:
            work = self._begin(call)
        finally:
            turnstile.leave()
        return None, await work

    def _begin(self, call: Call) -> asyncio.Future[object]:
        method = self._host if call.service == "" else getattr(self._service(call.service), call.method)
        if inspect.iscoroutinefunction(method):
            return asyncio.ensure_future(self._call_async(method, call.args))
        return self._thread.run(partial(_call_sync, method, call.args))

    async def _call_async(self, method: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> object:
        loop = asyncio.get_running_loop()
        fetched = await loop.run_in_executor(None, resolve, tuple(args)) if _has_reference(args) else args
        return await method(*fetched)

    def _host(self, name: str, path: str, kwargs: Mapping[str, object]) -> None:
        if name in self._services:
            raise InputError(f"this worker already hosts a service named {name!r}")
        if self._context is None:
            raise RuntimeError("configure() must come before host()")
        service_class = import_class(path)
        given = {key: self._neighbour(value) for key, value in kwargs.items()}
        self._services[name] = service_class(self._context, **given)

    def _neighbour(self, value: object) -> object:
        if not isinstance(value, Hosted):
            return resolve(value)
        service = self._service(value.service)
        return service if value.attribute is None else getattr(service, value.attribute)

    def _service(self, name: str) -> object:
        if name not in self._services:
            raise InputError(f"this worker hosts no service {name!r}; it hosts {sorted(self._services) or 'none'}")
        return self._services[name]

    async def dump_stacks(self) -> None:
        """Write the stack of every thread to the log."""
        faulthandler.dump_traceback(file=2, all_threads=True)

    async def close(self) -> None:
        """Close the services in reverse order; then the process may be ended."""
        for name in reversed(list(self._services)):
            service = self._services.pop(name)
            if isinstance(service, Closeable):
                await self._thread.run(service.close)
        sys.stdout.flush()
        sys.stderr.flush()


def import_class(path: str) -> Callable[..., object]:
    """The class at `pkg.mod:Class`. Raises InputError naming the path and what is missing."""
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise InputError(f"service path {path!r} must look like `pkg.mod:Class`")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise InputError(f"service path {path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InputError(f"service path {path!r} is a {type(found).__name__}, must be a class")
    return found


def resolve(value: Any) -> Any:
    """`value` with every object reference in it, also inside lists, tuples and dicts, replaced by the object."""
    if isinstance(value, ray.ObjectRef):
        return ray.get(value)
    if type(value) in (list, tuple):
        return type(value)(resolve(item) for item in value)
    if type(value) is dict:
        return {key: resolve(item) for key, item in value.items()}
    return value


def _has_reference(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(_has_reference(item) for item in value)
    if type(value) is dict:
        return any(_has_reference(item) for item in value.values())
    return isinstance(value, ray.ObjectRef)


def _call_sync(method: Callable[..., object], args: tuple[object, ...]) -> object:
    return method(*resolve(args))


def _capture_output(path: Path) -> int:
    """Send stdout and stderr, also those of native code, to the end of `path`; returns the file's size before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    start = os.fstat(handle).st_size
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    redacting_handlers("%(asctime)s %(levelname)s %(name)s: %(message)s")
    _quieten()
    return start


def _quieten() -> None:
    """Keep out of the log what libraries say at every start and nobody can act on, so that its last lines tell something."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")  # services run beside the event loop, not in it
    for words in _LIBRARY_WARNINGS:
        warnings.filterwarnings("ignore", message=words)


def _text_stream(handle: int) -> TextIO:
    return open(handle, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
