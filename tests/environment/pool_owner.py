"""A process that owns a pool whose environment never returns; prints the environment's process id and waits to be killed."""

import asyncio

from nemo_rl_like.environment.process import EnvironmentProcess
from nemo_rl_like.environment.types import Message, Task
from nemo_rl_like.environment.wire import Advance, Open
from nemo_rl_like.spec.environment import EnvironmentSpec


async def main() -> None:
    spec = EnvironmentSpec(name="tests.environment.sample_sources:Echo")
    process = await EnvironmentProcess.start(spec, extra_env={}, timeout_s=120)
    await process.call(Open(0, Task("t", {"text": "t"}), 0), 60)
    hanging = asyncio.create_task(process.call(Advance(0, Message("assistant", "hang")), 600))
    await asyncio.sleep(1.0)  # now the environment's loop is blocked, so it cannot see that its standard input ends
    print(process.pid, flush=True)
    await hanging


asyncio.run(main())
