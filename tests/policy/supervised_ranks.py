"""What the ranks of `test_supervised_laws.py` do; each function returns plain values from rank 0."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from nemo_rl_like.algorithms.objectives import Auxiliary, CrossEntropy
from nemo_rl_like.data.messages import Message, WeightedMessage, user
from nemo_rl_like.data.packing import PackedDocuments, piece_rows
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.sft_rows import sft_rows
from nemo_rl_like.data.tokenizer import character_tokenizer
from nemo_rl_like.policy.rank import PolicyRank, Walk
from nemo_rl_like.spec.optimizer import AdamWOptimizer
from nemo_rl_like.spec.policy import LayoutSpec, PolicySpec
from nemo_rl_like.tokens.batch import TokenBatch, batch_rows
from tests.policy.ranks import of_any_layout
from tests.policy.step_laws import member

RENDERER = Renderer(character_tokenizer("0123456789+="), "test")
VOCAB = len(RENDERER.tokenizer)
FAST = AdamWOptimizer(lr=3e-3)
OBJECTIVE = CrossEntropy(z_loss=0.01)
PTX = Auxiliary(CrossEntropy(), 0.5, "ptx")


def weighted_batch() -> TokenBatch:
    """Conversations of two turns, whose answers have weights from 0 to 2."""
    draw = random.Random(1)
    conversations: list[list[Message]] = []
    for i in range(6):
        said: list[Message] = []
        for turn in range(2):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            weight = (0.0, 0.5, 1.0, 2.0)[(i + turn) % 4]
            said += [user(f"{a}+{b}="), WeightedMessage("assistant", str(a + b), weight)]
        conversations.append(said)
    return batch_rows(sft_rows(conversations, RENDERER, max_tokens=40).rows)


def text_batch() -> TokenBatch:
    """Packed rows of documents, each document's pieces apart."""
    draw = random.Random(2)
    documents = [[draw.randint(4, VOCAB - 1) for _ in range(draw.randint(2, 20))] for _ in range(9)]
    packed = PackedDocuments(documents, 16, 1)
    rows = [packed.row(i, 0) for i in range(packed.rows)]
    return batch_rows(piece_rows(rows, attend_across_documents=False))


def losses(
    rank: int, world: int, port: int, folder: Path, layouts: list[tuple[LayoutSpec, str, int]]
) -> list[dict[str, float]]:
    """Metrics of a step with weights, z-loss and text, and of both losses without a step, at each layout, rows and budget."""
    found = []
    for layout, rows, budget in layouts:
        policy = PolicySpec.model_validate({"layout": layout, "rows": rows, "micro_batch_tokens": budget})
        this = member(rank, world, port, folder, policy, FAST)
        batch, text = weighted_batch(), text_batch()
        seen = {f"eval/{k}": v for k, v in this.evaluate_loss(batch, OBJECTIVE).items()}
        seen |= {f"text/{k}": v for k, v in this.evaluate_loss(text, CrossEntropy()).items()}
        seen |= of_any_layout(this.train_step(batch, None, OBJECTIVE, auxiliary=(text, PTX)))
        seen |= {f"after/{k}": v for k, v in this.evaluate_loss(text, CrossEntropy()).items()}
        found.append(seen)
    return found


def joint(rank: int, world: int, port: int, folder: Path, layout: LayoutSpec) -> dict[str, float]:
    """How far the joint step's gradient is from the sum of both, and how large each part is."""
    this = member(rank, world, port, folder, PolicySpec(layout=layout, micro_batch_tokens=32), FAST)
    batch, text = weighted_batch(), text_batch()

    def gradient(*, own: bool, further: bool) -> torch.Tensor:
        this.backend.zero_grad()
        if further:
            this._add_gradients(text, PTX)
        if own:
            walk_of(this, batch)
        else:
            walk_of(this, text, scale=0.0)
        return torch.cat([p.main_grad.flatten().double() for p in this.model.parameters()])

    def walk_of(rank: PolicyRank, rows: TokenBatch, scale: float = 1.0) -> None:
        stats = OBJECTIVE.prepare(rows)
        rank._walk(rows, stats.live_rows, Walk(1.0, OBJECTIVE, stats, scale=scale), training=True)

    mine, texts = gradient(own=True, further=False), gradient(own=False, further=True)
    both = gradient(own=True, further=True)
    return {
        "difference": float((both - mine - texts).abs().max()),
        "mine": float(mine.abs().max()),
        "text": float(texts.abs().max()),
    }


def all_of(rank: int, world: int, port: int, folder: Path, layouts: list[Any], layout: LayoutSpec) -> tuple[Any, Any]:
    """Both, in one process group."""
    return losses(rank, world, port, folder, layouts), joint(rank, world, port, folder, layout)
