"""`nrl tokenizer train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from nemo_rl_like.data.tokenizer_training import train_tokenizer


def train(files: Sequence[Path], size: int, out: Path) -> None:
    """Train a tokenizer and print its size and where it lies."""
    made = train_tokenizer(files, size, out)
    typer.echo(f"{out}: {len(made)} tokens")
