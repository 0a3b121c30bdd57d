"""The process behind `export.parity`: `python -m nemo_rl_like.export.parity_process FOLDER`, which holds its task and gets what it finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.ports import free_port
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.messages import assistant, user
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.tokenizer import load_tokenizer
from nemo_rl_like.export.hf import trained_stops
from nemo_rl_like.export.parity import FOUND, TASK, Found, Task
from nemo_rl_like.generation.embedded import EmbeddedEngine
from nemo_rl_like.generation.types import Request, Sampling
from nemo_rl_like.model import runtime
from nemo_rl_like.model.check import LARGEST_TOLERANCE, TINY_TOLERANCE, random_rows
from nemo_rl_like.model.check_rank import row_logits
from nemo_rl_like.model.factory import build_model
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.model.outline import outline_of
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.policy import LayoutSpec

_PROMPTS = (3, 9, 14)
"""Tokens of each prompt."""
_NEW_TOKENS = 16
_SAID = "2+3="


def main(scratch: Path) -> None:
    """Compare what the task names, and write what was found."""
    task = Task(**json.loads((scratch / TASK).read_bytes()))
    found = compare(Path(task.checkpoint), Path(task.export), task.seed)
    (scratch / FOUND).write_text(json.dumps(asdict(found)), encoding="utf-8")


def compare(checkpoint: Path, export: Path, seed: int) -> Found:
    """Logits and greedy tokens of both, in float32 whatever the stored type, and how both tokenizers render and stop."""
    outline = outline_of(checkpoint)
    rows = random_rows(outline, seed)
    prompts = [row[: min(count, len(row) - 1) or 1] for row, count in zip(rows, _PROMPTS, strict=False)]
    room = outline.max_positions - max(len(prompt) for prompt in prompts)
    reference, logits, greedy = trainers(checkpoint, rows, prompts, min(_NEW_TOKENS, room))
    exact, theirs = plain_logits(export, rows, torch.float64), plain_logits(export, rows, torch.float32)
    rounding = _largest(theirs, exact)
    tolerance = min(max(3 * rounding, TINY_TOLERANCE), LARGEST_TOLERANCE)
    difference = _largest(logits, theirs)
    problems = []
    if not difference <= tolerance:
        problems.append(f"logits differ by {difference:.3g}, at most {tolerance:.3g} may be rounding")
    ties = 0
    model = plain_model(export, torch.float32)
    for prompt, ids in zip(prompts, greedy, strict=True):
        where = first_difference(model, prompt, ids, tolerance)
        ties += where == "tie"
        if isinstance(where, int):
            problems.append(f"greedy tokens after {list(prompt)} differ from place {where} on")
    problems += tokenizer_differences(checkpoint, export, outline.vocab_size)
    count = sum(len(ids) for ids in greedy)
    return Found(reference, sum(map(len, rows)), difference, tolerance, count, ties, tuple(problems))


def trainers(
    folder: Path, rows: Sequence[list[int]], prompts: Sequence[list[int]], new_tokens: int
) -> tuple[Literal["megatron", "transformers"], list[Tensor], list[tuple[int, ...]]]:
    """Logits [row length, vocab] of each row and greedy tokens of each prompt, by what trains the model."""
    try:
        config = ModelConfig.from_hf_folder(folder)
    except InputError:  # a family of `policy.backend: fsdp`, which transformers itself computes
        model = plain_model(folder, torch.float32)
        return "transformers", _logits(model, rows), [greedy_tokens(model, prompt, new_tokens) for prompt in prompts]
    runtime.init_distributed(0, 1, "127.0.0.1", free_port("127.0.0.1"), LayoutSpec(), 600.0, torch.get_num_threads())
    with SafetensorsReader(folder) as reader:
        megatron = build_model(config, LayoutSpec(), torch.float32, weights=reader).eval()
    logits = row_logits(megatron, [list(row) for row in rows])
    assert logits is not None  # one rank is the last stage's
    engine = EmbeddedEngine(_alone(), model_handle=megatron, engine=EngineSpec())
    requests = [Request(f"prompt {i}", tuple(prompt), (0,)) for i, prompt in enumerate(prompts)]
    how = Sampling(greedy=True, max_new_tokens=new_tokens, ignore_stop=True)
    greedy = [completion.ids for (completion,) in engine.generate(requests, how)]
    runtime.shutdown_distributed()
    return "megatron", logits, greedy


def plain_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The folder as transformers loads it; its own layers one after the other, as fused ones know neither float64 nor Gemma 2's cap."""
    return AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=dtype,
        local_files_only=True,
        experts_implementation="eager",
        attn_implementation="eager",
        trust_remote_code=False,
    ).eval()


def plain_logits(folder: Path, rows: Sequence[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """Logits [row length, vocab] of each row."""
    return _logits(plain_model(folder, dtype), rows)


@torch.inference_mode()
def greedy_tokens(model: PreTrainedModel, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The most likely tokens after the prompt, each with the whole row computed anew."""
    row = list(prompt)
    for _ in range(count):
        row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
    return tuple(row[len(prompt) :])


@torch.inference_mode()
def first_difference(
    model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], tolerance: float
) -> int | Literal["tie"] | None:
    """The first place at which `model` would have taken another token; `tie` if its two best logits are within rounding there."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
    for place, (row, token) in enumerate(zip(logits, ids, strict=True)):
        best = float(row.max())
        if int(row.argmax()) != token:
            return "tie" if best - float(row[token]) <= 2 * tolerance else place
    return None


def tokenizer_differences(checkpoint: Path, export: Path, vocab: int) -> list[str]:
    """Where plain transformers reads the export's tokenizer and stop tokens otherwise than the trainer reads the checkpoint's."""
    mine, theirs = (
        load_tokenizer(checkpoint),
        AutoTokenizer.from_pretrained(str(export), local_files_only=True, trust_remote_code=False),
    )
    problems = []
    if mine.get_vocab() != theirs.get_vocab():
        problems.append("the tokenizers have other vocabularies")
    if mine.chat_template:
        renderer = Renderer(mine, str(checkpoint))
        messages = [user(_SAID), assistant(_SAID), user(_SAID)]
        plain = theirs.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages], tokenize=False, add_generation_prompt=True
        )
        if plain != renderer.text(messages, answer_next=True):
            problems.append("the chat templates render a conversation otherwise")
    ends = GenerationConfig.from_pretrained(str(export)).eos_token_id
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    lost = sorted(set(trained_stops(checkpoint)) - stops)
    if lost:
        problems.append(f"generation_config.json does not stop at token {lost[0]}, at which the trainer's answers end")
    if any(not 0 <= stop < vocab for stop in stops):
        problems.append(f"generation_config.json stops at {sorted(stops)}, and the vocabulary has {vocab} tokens")
    return problems


@torch.inference_mode()
def _logits(model: PreTrainedModel, rows: Sequence[list[int]]) -> list[Tensor]:
    return [cast(Tensor, model(input_ids=torch.tensor([row])).logits[0]) for row in rows]


def _largest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Largest difference; NaN where either has one."""
    differences = [(a.double() - b.double()).abs().max() for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(differences).max())


def _alone() -> RankContext:
    return RankContext("parity", 0, 1, {}, {}, "127.0.0.1", 0, 0, Path(), "")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
