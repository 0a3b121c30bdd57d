"""Says what vLLM makes of a base model with an adapter beside it, unmerged. Arguments: model folder, adapter folder, JSON file of rows of ids.

Writes `{"adapted": log-probs, "base": log-probs}` to standard output, each of every token but the first of each row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TORCHDYNAMO_DISABLE": "1",
}


def served(base: Path, adapter: Path, rows: Sequence[Sequence[int]], scratch: Path) -> dict[str, list[list[float]]]:
    """What vLLM says, from processes of its own that end before this returns."""
    asked = scratch / "rows.json"
    asked.write_text(json.dumps(rows))
    command = [sys.executable, str(Path(__file__)), str(base), str(adapter), str(asked)]
    done = subprocess.run(command, env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    base, adapter, asked = sys.argv[1:]
    rows = json.loads(Path(asked).read_text())
    llm = LLM(
        base,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=20 << 20,
        max_model_len=32,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=1,
    )
    how = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)

    def said(lora: Any) -> list[list[float]]:
        prompts = [{"prompt_token_ids": row} for row in rows]
        outputs = llm.generate(prompts, how, lora_request=lora, use_tqdm=False)
        return [
            [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], row[1:], strict=True)]
            for out, row in zip(outputs, rows, strict=True)
        ]

    sys.stdout.write(
        "\n" + json.dumps({"adapted": said(LoRARequest("adapter", 1, adapter)), "base": said(None)}) + "\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
