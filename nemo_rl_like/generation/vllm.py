"""`VllmEngine`: vLLM beside the policy; token ids in and out, behavior log-probs, verified weight updates."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import safe_open

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation import vllm_plugin
from nemo_rl_like.generation.segments import descendants, mapped_inodes, names_restored, unlink_segments
from nemo_rl_like.generation.types import Completion, Request, Sampling, StopReason, SyncReport
from nemo_rl_like.generation.vllm_report import MERGED_FORMAT, WorkerReport
from nemo_rl_like.model import runtime
from nemo_rl_like.model.merged_reader import merged_of, open_weights
from nemo_rl_like.model.outline import Outline, outline_of
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.model import DType
from nemo_rl_like.tensors.words import signed_64
from nemo_rl_like.weights.errors import WeightSyncError, told_of
from nemo_rl_like.weights.manifest import compare
from nemo_rl_like.weights.network import Offer, WeightMirror
from nemo_rl_like.weights.shared_memory import SharedMemoryHandle

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")
WORKER_EXTENSION = "nemo_rl_like.generation.vllm_worker.WorkerExtension"
_BLOCK_TOKENS = 32
"""Tokens of one KV block, the unit in which prefixes are shared; vLLM's CPU kernels want multiples of 32."""
_PREFILL_TOKENS = 8192
"""Tokens that vLLM computes in one step, at least one whole prompt."""
_CANARY_TOKENS = 2 * _BLOCK_TOKENS + 1
"""Length of the request that proves an empty prefix cache."""
_SHUTDOWN_GRACE_S = 1.0
_STOPS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VllmEngine:
    """One vLLM replica, in processes of its own that end with this one.

    Args: `context` from the worker group; `model_folder`, a Hugging Face folder with config.json and safetensors (a
    tokenizer is not used); `dtype` of weights and activations; `engine` from the spec, whose `tensor_parallel` processes
    share the model, each with its part of the threads; `start_timeout_s` and `call_timeout_s` bound the start and each call,
    in seconds; `worker_extension`, the class that vLLM mixes into its workers. The folder's weights are version 0.

    Raises InputError if the package is not installed well enough for vLLM to find its plugin.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        model_folder: str,
        dtype: DType,
        engine: EngineSpec,
        start_timeout_s: float = 600.0,
        call_timeout_s: float = 3600.0,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        vllm_plugin.require_registered()
        self._name = f"engine rank {context.rank}"
        config = outline_of(Path(model_folder))
        self._vocab_size = config.vocab_size
        self._max_context = min(engine.max_context or config.max_positions, config.max_positions)
        self._expected = sorted(_weight_names(Path(model_folder), config))
        self._call_timeout = call_timeout_s
        self._version = 0
        self._broken: str | None = None
        self._running = 0
        self._serial = itertools.count()
        self._unlinked: list[str] = []
        self._mirror = WeightMirror()
        threads = (engine.threads or context.threads or len(os.sched_getaffinity(0))) // engine.tensor_parallel
        os.environ.update(_environment(max(1, threads), engine.enforce_eager, start_timeout_s))
        self._loop = _LoopThread()
        start = self._start(model_folder, engine.dtype or dtype, engine, worker_extension)
        self._loop.run(start, start_timeout_s, "the start of vLLM")

    @property
    def version(self) -> int:
        """Version of the weights that it samples from."""
        return self._version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One list per request with one completion per seed. See `Engine.generate`."""
        return self._loop.run(self._generate_all(requests, sampling), self._call_timeout, "vLLM's completions")

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """The completions of one request; many calls may run at once, from any event loop."""
        future = asyncio.run_coroutine_threadsafe(self._generate(request, sampling), self._loop.loop)
        return await asyncio.wrap_future(future)

    def score(self, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """For each row of n tokens, the log-probs of all but the first. See `Engine.score`."""
        return self._loop.run(self._score_all(rows), self._call_timeout, "vLLM's prompt log-probs")

    def update_weights(self, version: int, handle: SharedMemoryHandle | None) -> SyncReport:
        """Read, verify and load new weights, drop the prefix cache, and prove that it is empty.

        `version` must be the handle's and not below the current one. Raises WeightSyncError naming the tensors or the
        step that failed, and this replica. If wrong bytes arrived, the old weights stay in use; after a later failure the
        engine refuses to generate until an update succeeds.
        """
        with told_of(self._name):
            source = self._accepted(version, handle)
            return self._loop.run(self._update(source), self._call_timeout, f"the weight sync of version {version}")

    def mirror(self, offer: Offer, address: str) -> Offer:
        """Bring weights that another host offers into this host's memory; returns the offer of them at `address`, this host's.

        Raises WeightSyncError naming the serving host, and this replica.
        """
        with told_of(self._name):
            return self._mirror.fetch(offer, address)

    def unmirror(self) -> None:
        """Give back the memory that `mirror` holds, and end its offer."""
        self._mirror.close()

    def _accepted(self, version: int, handle: SharedMemoryHandle | None) -> SharedMemoryHandle:
        """The handle, if it is of the version that was asked for and that is not an old one."""
        if handle is None:
            raise WeightSyncError(f"weight sync of version {version}: vLLM needs the handle of the published weights")
        if handle.manifest.version != version:
            raise WeightSyncError(
                f"weight sync of version {version}: the published weights are of version {handle.manifest.version}"
            )
        if version < self._version:
            raise WeightSyncError(
                f"weight sync of version {version}: an old version; the engine holds {self._version} already"
            )
        return handle

    def sleep(self) -> None:
        """Give back GPU memory (weights to the CPU, KV cache dropped). On the CPU there is nothing to give."""
        if runtime.on_cuda():
            self._loop.run(self._llm.sleep(level=1), self._call_timeout, "vLLM's sleep")

    def wake(self) -> None:
        """Undo `sleep`."""
        if runtime.on_cuda():
            self._loop.run(self._llm.wake_up(), self._call_timeout, "vLLM's wake-up")

    def close(self) -> None:
        """End vLLM's processes."""
        self._mirror.close()
        with names_restored(self._unlinked):
            self._loop.run(self._shutdown(), self._call_timeout, "vLLM's end")
        self._loop.close()
        gc.collect()  # vLLM's cycles end now: its finaliser would fail while the interpreter ends

    async def _start(self, folder: str, dtype: DType, engine: EngineSpec, worker_extension: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=folder,
            load_format="auto" if merged_of(Path(folder)) is None else MERGED_FORMAT,
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=dtype,
            quantization=engine.quantization,
            max_model_len=self._max_context,
            max_num_seqs=engine.max_batch_rows,
            kv_cache_memory_bytes=int(engine.kv_cache_gib * 2**30),
            enforce_eager=engine.enforce_eager,
            enable_prefix_caching=True,
            # A prompt that is cut rewinds its request's generator, which a CPU generator cannot do: vLLM's engine dies of it.
            enable_chunked_prefill=runtime.on_cuda(),
            max_num_batched_tokens=max(self._max_context, _PREFILL_TOKENS),
            block_size=_BLOCK_TOKENS,
            enable_sleep_mode=runtime.on_cuda(),
            logprobs_mode="processed_logprobs",
            tensor_parallel_size=engine.tensor_parallel,
            worker_extension_cls=worker_extension,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        mine = os.getpid()
        before = mapped_inodes([mine])
        self._llm: AsyncLLM = AsyncLLM.from_engine_args(args)
        await self._canary()
        self._unlinked = unlink_segments(mapped_inodes({mine, *descendants(mine)}) - before)

    async def _shutdown(self) -> None:
        self._llm.shutdown(_SHUTDOWN_GRACE_S)
        del self._llm
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=_SHUTDOWN_GRACE_S)  # vLLM cancelled them; they still hold it

    async def _generate_all(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return list(await asyncio.gather(*(self._generate(request, sampling) for request in requests)))

    async def _generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        room = self._room(request)
        return list(
            await asyncio.gather(
                *(self._sample(request, seed, min(room, sampling.max_new_tokens), sampling) for seed in request.seeds)
            )
        )

    async def _sample(self, request: Request, seed: int, max_tokens: int, sampling: Sampling) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            max_tokens=max_tokens,
            seed=None if sampling.greedy else signed_64(seed),
            stop_token_ids=sorted(sampling.stops),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        version = self._version
        output = await self._ask(request.prompt_ids, params, request.request_id, f"version-{version}")
        sample = output.outputs[0]
        ids = tuple(sample.token_ids)
        if sample.logprobs is None or sample.finish_reason is None:
            raise RuntimeError(f"vLLM ended request {request.request_id!r} without log-probs or a stop reason")
        found = zip(sample.logprobs, ids, strict=True)
        logprobs = tuple(entry[token].logprob for entry, token in found if entry is not None)
        return Completion(ids, logprobs, version, _STOPS[sample.finish_reason])

    async def _score_all(self, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
        return list(await asyncio.gather(*(self._score(row) for row in rows)))

    async def _score(self, row: tuple[int, ...]) -> list[float]:
        from vllm import SamplingParams

        self._room(Request("score", row, (0,)))
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        output = await self._ask(row, params, "score", f"version-{self._version}")
        if output.prompt_logprobs is None:
            raise RuntimeError("vLLM returned no prompt log-probs")
        found = zip(output.prompt_logprobs[1:], row[1:], strict=True)
        return [entry[token].logprob for entry, token in found if entry is not None]

    async def _ask(self, prompt: Sequence[int], params: SamplingParams, name: str, salt: str) -> RequestOutput:
        if self._broken is not None:
            raise WeightSyncError(f"the engine cannot generate: {self._broken}")
        return await self._run(prompt, params, name, salt)

    async def _run(self, prompt: Sequence[int], params: SamplingParams, name: str, salt: str) -> RequestOutput:
        """Run one request to its end. `salt` separates the prefix caches of weight versions."""
        from vllm.inputs.engine import tokens_input

        last: RequestOutput | None = None
        self._running += 1
        try:
            stream = self._llm.generate(
                tokens_input(list(prompt), cache_salt=salt), params, f"{name}#{next(self._serial)}"
            )
            async for output in stream:
                last = output
        finally:
            self._running -= 1
        if last is None:
            raise RuntimeError(f"vLLM gave no output for request {name!r}")
        return last

    async def _update(self, handle: SharedMemoryHandle) -> SyncReport:
        version, started = handle.manifest.version, time.monotonic()
        if self._running:
            raise WeightSyncError(
                f"weight sync of version {version}: {self._running} requests are in flight; wait for them"
            )
        answers = await self._llm.collective_rpc("nrl_update_weights", args=(handle.to_json(), self._expected))
        reports = [WorkerReport.from_json(answer) for answer in answers]
        refused = [report.error for report in reports if report.error is not None]
        if len(refused) < len(reports):  # a worker has loaded something
            self._broken = f"the weight sync of version {version} did not succeed"
        if refused:
            raise WeightSyncError(refused[0])
        for report in reports:
            compare(handle.manifest, report.checksums, report.consumed, self._expected)
        await self._reset_prefix_cache(version)
        self._version, self._broken = version, None
        first, seconds = reports[0], time.monotonic() - started
        return SyncReport(version, first.checksums, frozenset(first.consumed), handle.manifest.nbytes, seconds)

    async def _reset_prefix_cache(self, version: int) -> None:
        """Drop the prefix cache; the canary, asked at the start and after each update, must then find nothing in it."""
        if not await self._llm.reset_prefix_cache():
            raise WeightSyncError(f"weight sync of version {version}: vLLM refused to reset its prefix cache")
        cached = await self._canary()
        if cached:
            raise WeightSyncError(
                f"weight sync of version {version}: the prefix cache was not reset; {cached} tokens of the canary "
                "request came from it"
            )

    async def _canary(self) -> int:
        """Ask a fixed request whose cache entries no version separates; returns how many of its tokens were cached."""
        from vllm import SamplingParams

        prompt = [i % self._vocab_size for i in range(min(_CANARY_TOKENS, self._max_context - 1))]
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
        output = await self._run(prompt, params, "canary", "canary")
        return output.num_cached_tokens or 0

    def _room(self, request: Request) -> int:
        room = self._max_context - len(request.prompt_ids)
        if room < 1:
            raise InputError(
                f"request {request.request_id!r}: a prompt of {len(request.prompt_ids)} tokens leaves no room in the "
                f"context of {self._max_context} (engine.max_context); shorten the prompt or raise the limit"
            )
        return room


class _LoopThread:
    """An event loop on a thread of its own, so that the engine works from any thread and any other loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, object, T], timeout_s: float, what: str) -> T:
        """The result of `work`. Raises TimeoutError naming `what` after `timeout_s` seconds."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"waited {timeout_s:g} s for {what}") from error

    def close(self) -> None:
        """Stop the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def _environment(threads: int, eager: bool, start_timeout_s: float) -> dict[str, str]:
    """Settings of vLLM's processes, which inherit this process's environment."""
    return {
        vllm_plugin.OWNER_ENV: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `auto` would reserve a core and pin the rest
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(start_timeout_s)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1" if eager else "0",  # vLLM compiles a log-prob helper even then: 20 s at first use
    }


def _weight_names(folder: Path, config: Outline) -> set[str]:
    """Hugging Face names that the model needs: those in the folder, without a copy of a tied head.

    Raises InputError if the folder has no safetensors.
    """
    names: set[str] = set()
    if merged_of(folder) is not None:
        with open_weights(folder) as weights:
            names.update(weights.keys())
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    if not names:
        raise InputError(f"{folder} has no *.safetensors file; vLLM needs a Hugging Face folder with weights")
    return names - {"lm_head.weight"} if config.tie_embeddings else names
