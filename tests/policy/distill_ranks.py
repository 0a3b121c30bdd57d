"""What the ranks of `test_distill_laws.py` do; each function returns plain values from rank 0."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from nemo_rl_like.algorithms.distillation import Distillation
from nemo_rl_like.algorithms.objectives import CrossEntropy
from nemo_rl_like.data.distill_rows import Conversation, own_rows
from nemo_rl_like.data.messages import assistant, user
from nemo_rl_like.policy.rank import PolicyRank
from nemo_rl_like.policy.top import TopK, top_of_batch
from nemo_rl_like.spec.distill import DistillationSpec
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows
from tests.policy.preference_ranks import FAST, RENDERER
from tests.policy.step_laws import member

TEMPERATURE = 1.3
K = 4


def conversations() -> TokenBatch:
    """Rows of two teachers, of different length."""
    texts = [("1+2=", "3", 0), ("10+12=", "22", 1), ("7+8=", "15", 1), ("1=", "1111", 0), ("99+1=", "100", 1)]
    made = [
        Conversation(i, (user(question), assistant(answer)), teacher, f"rows:{i}")
        for i, (question, answer, teacher) in enumerate(texts)
    ]
    return batch_rows(own_rows(made, RENDERER, max_tokens=32).rows)


def told(this: PolicyRank, batch: TokenBatch, policy: PolicySpec, **fields: Any) -> dict[str, torch.Tensor]:
    """The extras of a batch as `this` teacher tells them."""
    ids, logprobs = top_of_batch(this.backend, batch, TopK(K, TEMPERATURE, **fields), policy)
    return {"teacher_ids": ids, "teacher_logprobs": logprobs}


def taught(
    rank: int, world: int, port: int, student: Path, teacher: Path, layouts: list[tuple[LayoutSpec, str, int]]
) -> list[dict[str, Any]]:
    """What a teacher tells, and the metrics with and without a step, at each layout, kind of rows and budget."""
    found = []
    for layout, rows, budget in layouts:
        policy = PolicySpec.model_validate({"layout": layout, "rows": rows, "micro_batch_tokens": budget})
        this = member(rank, world, port, student, policy, FAST)
        other = member(rank, world, port, teacher, policy, FAST)
        batch = conversations()
        extras = told(other, batch, policy)
        parts = [told(other, batch, policy, teacher=number)["teacher_logprobs"] for number in (0, 1)]
        ready = batch.with_extras(**extras)
        objective = Distillation(DistillationSpec(beta=0.3, sft_coef=0.1))
        seen = {f"eval/{k}": v for k, v in this.evaluate_loss(ready, objective, TEMPERATURE).items()}
        seen |= this.train_step(ready, None, objective, TEMPERATURE)
        after = {f"after/{k}": v for k, v in this.evaluate_loss(ready, objective, TEMPERATURE).items()}
        found.append({"extras": extras, "parts": parts, "metrics": seen | after})
    return found


def talks(count: int, seed: int, *, right: bool) -> list[Conversation]:
    """Sums whose right answer repeats the first digit, and whose wrong one is two other digits."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        answer = f"{a}{a}" if right else "".join(str((a + draw.randint(1, 9)) % 10) for _ in range(2))
        made.append(Conversation(i, (user(f"{a}+{b}="), assistant(answer)), 0, f"talks:{i}"))
    return made


def learned(rank: int, world: int, port: int, student: Path, teacher: Path, steps: int) -> dict[str, float]:
    """-log p of held-out right answers: of a trained teacher, of the student, and after `steps` steps on wrong answers with the
    teacher's word for them, and without."""
    policy = PolicySpec(micro_batch_tokens=1024)
    held = batch_rows(own_rows(talks(40, 9, right=True), RENDERER, max_tokens=32).rows)
    wrong = batch_rows(own_rows(talks(120, 2, right=False), RENDERER, max_tokens=32).rows)
    master = member(rank, world, port, teacher, policy, FAST)
    lessons = batch_rows(own_rows(talks(120, 1, right=True), RENDERER, max_tokens=32).rows)
    for _ in range(steps):
        master.train_step(lessons, None, CrossEntropy())
    ready = wrong.with_extras(**told(master, wrong, policy))
    found = {"teacher": master.evaluate_loss(held, CrossEntropy())["nll"]}
    for name, objective in (("taught", Distillation(DistillationSpec())), ("alone", CrossEntropy())):
        this = member(rank, world, port, student, policy, FAST)
        found["before"] = this.evaluate_loss(held, CrossEntropy())["nll"]
        for _ in range(steps):
            this.train_step(ready, None, objective, TEMPERATURE)
        found[name] = this.evaluate_loss(held, CrossEntropy())["nll"]
    return found
