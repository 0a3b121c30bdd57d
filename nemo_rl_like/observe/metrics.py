"""Where metrics go: one JSONL line a step always, TensorBoard beside it when asked for.

Names: `reward`, `rewards/<name>/mean`, `kl`, `entropy`, `clip_ratio/high_mean`, `completions/mean_length`,
`frac_reward_zero_std`, `timing/<part>` in seconds, `stop/<reason>` as a share of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemo_rl_like.observe.jsonl import JsonLines, read_lines


class JsonlSink:
    """`metrics.jsonl`: {"step": n, "<name>": value, ...} a line; a value that is not finite is null."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; a resumed run calls `truncate` before it writes."""
        self._lines = JsonLines(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line. Raises ValueError for the reserved name `step`."""
        if "step" in values:
            raise ValueError("a metric cannot be named `step`: each line has the step under that name")
        self._lines.append({"step": step, **values})

    def position(self) -> int:
        """Byte offset to keep in a checkpoint; everything before it is on disk."""
        return self._lines.position()

    def truncate(self, offset: int) -> None:
        """Drop what was written after byte `offset`, which a checkpoint kept.

        Raises OutputFolderError if the file is shorter.
        """
        self._lines.truncate(offset)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class TensorBoardSink:
    """TensorBoard event files; a resumed run hides the events of the steps it runs again."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        """`resume_step`: first step that the resumed run writes; None for a new run."""
        from torch.utils.tensorboard import SummaryWriter  # heavy: only when TensorBoard is on

        self._writer = SummaryWriter(str(folder), purge_step=resume_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record each value as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def read_series(path: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric from a `metrics.jsonl`, without the steps that lack it."""
    series: list[tuple[int, float]] = []
    for row in read_lines(path):
        step, value = row["step"], row.get(name)
        if isinstance(step, int) and isinstance(value, int | float):
            series.append((step, float(value)))
    return series
