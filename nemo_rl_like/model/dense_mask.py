"""Which tokens of a pass attend to which, as a [tokens, tokens] mask, for models that take no `AttentionLayout`."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_rl_like.model.attention_layouts import RowBlock, SharedPrefixLayout


def shared_prefix_mask(layout: SharedPrefixLayout, tokens: int, device: torch.device) -> Tensor:
    """bool [tokens, tokens]: true where a row's token attends to a column's, which is in its own row or its prompt, and not after it."""
    row, prompt = (torch.full((tokens,), -1, device=device) for _ in range(2))
    count = 0
    for block in layout.blocks:
        first = count
        for part in block.parts:
            within = _row_of_token(part, device)
            row[part.start : part.stop] = within + count
            of_row = within if part is block.prompts else block.prompt_of_response[within]
            prompt[part.start : part.stop] = of_row + first
            count += part.rows
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return causal & ((row[:, None] == row) | (prompt[:, None] == row))


def _row_of_token(block: RowBlock, device: torch.device) -> Tensor:
    """int64 [stop - start] row within the block of each of its tokens."""
    places = torch.arange(block.rows * block.width, device=device) if block.unpad is None else block.unpad
    return places // max(1, block.width)
