"""Says what vLLM samples from a base model with an adapter beside it, unmerged. Arguments: model folder, adapter folder, JSON file of prompts of
ids.

Writes `{"adapted": samples, "base": samples}` to standard output; a sample has ids and log-probs. vLLM 0.32 on the CPU gives no log-probs of
prompts beside adapters: it counts one place a request where it asks adapters for logits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sample:
    """Sampled ids and what vLLM says of each."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def served(base: Path, adapter: Path, prompts: Sequence[Sequence[int]], scratch: Path) -> dict[str, list[Sample]]:
    """One sample a prompt, from processes of its own that end before this returns."""
    asked = scratch / "prompts.json"
    asked.write_text(json.dumps(prompts))
    command = [sys.executable, str(Path(__file__)), str(base), str(adapter), str(asked)]
    done = subprocess.run(command, env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    told = json.loads(done.stdout.splitlines()[-1])
    return {name: [Sample(tuple(ids), tuple(said)) for ids, said in samples] for name, samples in told.items()}


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    base, adapter, asked = sys.argv[1:]
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(Path(asked).read_text())]
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
    how = SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=0, detokenize=False, ignore_eos=True)

    def said(lora: Any) -> list[tuple[list[int], list[float]]]:
        outputs = [out.outputs[0] for out in llm.generate(prompts, how, lora_request=lora, use_tqdm=False)]
        return [
            (list(out.token_ids), [entry[i].logprob for entry, i in zip(out.logprobs, out.token_ids, strict=True)])
            for out in outputs
        ]

    sys.stdout.write(
        "\n" + json.dumps({"adapted": said(LoRARequest("adapter", 1, adapter)), "base": said(None)}) + "\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
