"""A training's progress in the terminal, and its metric files: what the Trainer tells, shown and written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_like.observe.metrics import JsonlSink, TensorBoardSink
from nemo_rl_like.observe.terminal import Bar, Terminal
from nemo_rl_like.training.recipe import StepReport

METRICS = "metrics.jsonl"


@dataclass(slots=True)
class TrainingScreen:
    """A progress bar, one metric line a step, and a table of samples when there are some."""

    terminal: Terminal
    title: str
    headline: tuple[str, ...]
    every: int = 1
    """Show the line of every this many steps (lines with samples or evaluations always)."""
    _total: int = 0
    _bar: Bar | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    def begin(self, done: int, total: int) -> None:
        """Open the progress bar."""
        self._total = total
        self._bar = self._open.enter_context(self.terminal.progress(self.title, total, done))

    def step(self, step: int, report: StepReport) -> None:
        """Advance the bar and show the step."""
        if self._bar is not None:
            self._bar.advance()
        told = any(name.startswith(("eval/", "validation/")) for name in report.metrics)
        if step % self.every == 0 or told or report.samples:
            shown = {name: report.metrics[name] for name in self.headline if name in report.metrics}
            self.terminal.metrics(step, self._total, shown)
        if report.samples:
            self.terminal.samples(f"{self.title}: samples of step {step}", report.samples)

    def end(self) -> None:
        """Close the progress bar."""
        self._open.close()


class MetricFiles:
    """`metrics.jsonl` always, TensorBoard beside it when asked for."""

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lines = JsonlSink(folder / METRICS)
        self._tensorboard = tensorboard
        self._events: TensorBoardSink | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one line."""
        self._lines.write(step, metrics)
        if self._events is not None:
            self._events.write(step, metrics)

    def position(self) -> int:
        """How many lines there are, which is the same in equal runs."""
        return self._lines.position()

    def truncate(self, position: int, step: int) -> None:
        """Take back every line from `position` on; TensorBoard hides what was recorded after `step`."""
        self._lines.truncate(position)
        if self._tensorboard:
            self._events = TensorBoardSink(self._folder / "tensorboard", resume_step=step + 1 if step > 0 else None)

    def close(self) -> None:
        """Flush and close."""
        self._lines.close()
        if self._events is not None:
            self._events.close()
