"""Recompute a run's held-out greedy accuracy from its exported folder with plain transformers, and compare it with the report.

`python benchmarks/recompute_accuracy.py runs/demo [--checkpoint grpo]` exits with 1 unless the two agree exactly.
Only the exported folder and the questions and answers in the report are read; nothing of this project computes anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    """Print both figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", default="grpo", help="name of the evaluated checkpoint that was exported")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = json.loads((options.run / "evaluate" / "report" / "report.json").read_text())
    result = report["results"][options.checkpoint]
    folder = options.run / "export" / "model"
    answers = greedy_answers(
        folder, [task["prompt"] for task in result["tasks"]], report["evaluation"]["max_new_tokens"]
    )
    right = [answer == right_sum(task["prompt"]) for answer, task in zip(answers, result["tasks"], strict=True)]
    same = sum(answer == task["response"] for answer, task in zip(answers, result["tasks"], strict=True))
    figures = {
        "reported": result["metrics"]["eval/accuracy"],
        "recomputed": sum(right) / len(right),
        "same_answers": same,
        "tasks": len(right),
    }
    print(json.dumps(figures))
    return 0 if figures["reported"] == figures["recomputed"] and same == len(right) else 1


def greedy_answers(folder: Path, questions: list[str], new_tokens: int) -> list[str]:
    """The model's greedy answer to each question, by transformers' own `generate`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = []
    for start in range(0, len(questions), 64):
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
            for q in questions[start : start + 64]
        ]
        tokenizer.padding_side = "left"
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        out += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return out


def right_sum(question: str) -> str:
    """`12+34=` -> `46`."""
    left, right = question.removesuffix("=").split("+")
    return str(int(left) + int(right))


if __name__ == "__main__":
    sys.exit(main())
