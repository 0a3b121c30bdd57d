"""Real vLLM behind the double of Triton's backend: reads requests and writes answers, a JSON object a line.

Arguments: `model.json`, `multi_lora.json` or an empty string, and the descriptor to write to. The first line that it writes is `{"ready": true}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


def say(descriptor: int, line: dict[str, Any]) -> None:
    os.write(descriptor, (json.dumps(line) + "\n").encode())


async def answer(engine: Any, request: dict[str, Any], loras: dict[str, str], descriptor: int) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    given = dict(request["sampling"])
    name = given.pop("lora_name", None)
    lora = None if name is None else LoRARequest(name, sorted(loras).index(name) + 1, loras[name])
    prompt = request["text"] if request["ids"] is None else {"prompt_token_ids": request["ids"]}
    said: list[int] = []
    text = ""
    async for out in engine.generate(prompt, SamplingParams(**given), request["id"], lora_request=lora):
        one = out.outputs[0]
        more = {"text": one.text[len(text) :], "ids": list(one.token_ids)[len(said) :], "finished": out.finished}
        said, text = list(one.token_ids), one.text
        say(descriptor, more)


async def serve(arguments: Path, multi_lora: str, descriptor: int) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    loras = json.loads(Path(multi_lora).read_text()) if multi_lora else {}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**json.loads(arguments.read_text())))
    say(descriptor, {"ready": True})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        await answer(engine, json.loads(line), loras, descriptor)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
