"""What the memory of a pass is counted from: the shapes of its rows, and the sizes of one rank's part of it. Counted without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.spec.policy import LayoutSpec

FLOAT32, INT64 = 4, 8
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Rows that attend in one call, as wide as the longest of them."""

    rows: int
    queries: int
    """Places of a row that attend, in tokens."""
    keys: int
    """Places of a row that are attended to, in tokens."""
    padded: bool = False
    """The rows' lengths differ, so that queries are copied to padded places; keys and values too."""
    mask_rows: int = 0
    """Rows of the mask of responses that share their prompts, whose keys and values are put before their own; 0: plain causal rows."""


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """What the memory of a forward and backward pass depends on."""

    tokens: int
    """Places of the pass, with padding between rows if any."""
    scored: int
    """Places whose hidden states reach the head."""
    blocks: tuple[AttentionBlock, ...]

    @classmethod
    def packed(cls, tokens: int, longest: int) -> MicroBatchShape:
        """`tokens` end to end in rows of `longest`, every one of them scored."""
        rows, rest = divmod(tokens, longest)
        blocks = [AttentionBlock(rows, longest, longest)] if rows else []
        if rest:
            blocks.append(AttentionBlock(1, rest, rest))
        return cls(tokens, tokens, tuple(blocks))


@dataclass(frozen=True)  # without slots: sizes are counted once
class PassSizes:
    """Sizes of one rank's part of a micro-batch."""

    config: ModelConfig
    layout: LayoutSpec
    rows: MicroBatchShape
    itemsize: int
    """Bytes of an activation."""

    @cached_property
    def tokens(self) -> int:
        """Places of the linear layers: this rank's part of every row, padded so that tensor-parallel ranks get equal parts."""
        parts = self.layout.cp * (self.layout.tp if self.layout.sp else 1)
        return -(-self.rows.tokens // parts) * parts // self.layout.cp

    @cached_property
    def part(self) -> int:
        """Places between the linear layers."""
        return self.tokens // self.layout.tp if self.layout.sp else self.tokens

    @cached_property
    def residual(self) -> int:
        """Bytes of the residual stream."""
        return self.part * self.config.hidden_size * self.itemsize

    @cached_property
    def scored_here(self) -> int:
        """Places that this rank's head scores, if context-parallel ranks have equally many."""
        return -(-self.rows.scored // self.layout.cp)

    @cached_property
    def scored(self) -> int:
        """Numbers in the hidden states that reach the head."""
        return self.scored_here * self.config.hidden_size

    @cached_property
    def pairs(self) -> int:
        """Tokens that this rank's experts get if all get as many; ranks that share an expert get the same ones."""
        return 0 if self.config.experts is None else self.part * self.config.experts.per_token * self.layout.expert_tp

    @cached_property
    def routed(self) -> int:
        """Bytes of the hidden states of those."""
        return self.pairs * self.config.hidden_size * self.itemsize

    @cached_property
    def heads(self) -> int:
        """Query heads of this rank."""
        return self.config.heads // self.layout.tp

    @cached_property
    def kv_heads(self) -> int:
        """Key/value heads of this rank."""
        return self.config.kv_heads // self.layout.tp

    @cached_property
    def queries(self) -> int:
        """Width of all queries."""
        return self.heads * self.config.head_dim

    @cached_property
    def keys(self) -> int:
        """Width of all keys."""
        return self.kv_heads * self.config.head_dim

    @cached_property
    def vocabulary(self) -> int:
        """Tokens whose logits this rank computes."""
        return self.config.padded_vocab(self.layout.tp) // self.layout.tp
