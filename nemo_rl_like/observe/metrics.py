"""Where metrics go: one JSONL line a step always, TensorBoard beside it when asked for.

Names: `reward`, `rewards/<name>/mean`, `kl`, `entropy`, `clip_ratio/high_mean`, `completions/mean_length`,
`frac_reward_zero_std`, `timing/<part>` in seconds, `stop/<reason>` as a share of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from nemo_rl_like.artifacts.errors import OutputFolderError
from nemo_rl_like.observe.jsonl import JsonLines, read_lines


class JsonlSink:
    """`metrics.jsonl`: {"step": n, "<name>": value, ...} a line; a value that is not finite is null."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; a resumed run calls `truncate` before it writes."""
        self._lines = JsonLines(path)
        self._count = len(_whole_lines(path))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line. Raises ValueError for the reserved name `step`."""
        if "step" in values:
            raise ValueError("a metric cannot be named `step`: each line has the step under that name")
        self._lines.append({"step": step, **values})
        self._count += 1

    def position(self) -> int:
        """Number of lines, all on disk, for a checkpoint to keep; not of bytes, which the times in the lines make differ between equal runs."""
        self._lines.position()
        return self._count

    def truncate(self, lines: int) -> None:
        """Drop what was written after the first `lines` lines, which a checkpoint kept.

        Raises OutputFolderError if the file has fewer.
        """
        sizes = _whole_lines(self._lines.path)
        if len(sizes) < lines:
            raise OutputFolderError(
                f"{self._lines.path} has {len(sizes)} lines, but the checkpoint was written when it had {lines}: lines were removed; "
                "restore the file, or start again with --overwrite"
            )
        self._lines.truncate(sum(islice(sizes, lines)))
        self._count = lines

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


def _whole_lines(path: Path) -> list[int]:
    """Bytes of each line of a file, but for a last one that was cut by a crash."""
    with path.open("rb") as file:
        return [len(line) for line in file if line.endswith(b"\n")]


def read_series(path: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric from a `metrics.jsonl`, without the steps that lack it."""
    series: list[tuple[int, float]] = []
    for row in read_lines(path):
        step, value = row["step"], row.get(name)
        if isinstance(step, int) and isinstance(value, int | float):
            series.append((step, float(value)))
    return series
