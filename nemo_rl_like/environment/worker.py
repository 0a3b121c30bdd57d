"""Entry point of one environment process: reads calls on standard input, answers on what was standard output.

`python -m nemo_rl_like.environment.worker <parent pid>`; the first frame is the `environment:` block as JSON. The process ends when
its parent ends (Linux: also while the author's code never returns). What the author prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from typing import BinaryIO

from nemo_rl_like.artifacts.errors import NrlError
from nemo_rl_like.environment.dispatch import Dispatcher
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.environment.types import EnvironmentContractError, Unscorable
from nemo_rl_like.environment.wire import decode_call, encode_answer, frame, read_frame
from nemo_rl_like.spec.environment import EnvironmentSpec

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends."""
    _die_with_parent(int(sys.argv[1]))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    asyncio.run(_serve(_take_stdout()))


async def _serve(out: BinaryIO) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    block = await read_frame(reader)
    if block is None:
        return
    try:
        dispatcher = Dispatcher(resolve(EnvironmentSpec.model_validate_json(block)))
    except NrlError as error:
        _write(out, encode_answer(EnvironmentContractError(str(error))))
        return
    _write(out, encode_answer(None))
    while (payload := await read_frame(reader)) is not None:
        try:
            answer = encode_answer(await dispatcher.call(decode_call(payload)))
        except (Unscorable, EnvironmentContractError) as failure:
            answer = encode_answer(failure)
        except NrlError as error:
            answer = encode_answer(EnvironmentContractError(str(error)))
        _write(out, answer)


def _write(out: BinaryIO, payload: bytes) -> None:
    out.write(frame(payload))
    out.flush()


def _take_stdout() -> BinaryIO:
    """Keep the pipe to the parent for answers, and send everything printed to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    main()
