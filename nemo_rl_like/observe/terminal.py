"""What a run shows in the terminal: banner, progress, a metric line a step, tables of samples, what to type next.

On a terminal it uses colour and a live progress bar; anywhere else it writes plain lines without control codes.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.box import ASCII2, ROUNDED
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as RemainingColumn
from rich.table import Table
from rich.text import Text

_PLAIN_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Banner:
    """What a run says before it starts."""

    name: str
    """Name of the experiment."""
    spec: Mapping[str, str]
    """Resolved settings worth seeing, by spec path."""
    device: str
    """What it runs on, for example `2 CPU cores, gloo`."""
    batch: Sequence[str]
    """Batch arithmetic, one line a stage; see `rl_batch` and `sft_batch`."""
    output: str
    """Output folder."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled response."""

    prompt: str
    """The last thing the model was asked."""
    response: str
    """What it answered."""
    reward: float | None
    """None = could not be scored."""
    advantage: float | None = None
    """None = not computed."""


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """The same prompt answered by two checkpoints."""

    prompt: str
    """The question."""
    before: str
    """Answer of the earlier checkpoint."""
    after: str
    """Answer of the later one."""
    before_reward: float | None
    """Its reward; None = could not be scored."""
    after_reward: float | None
    """Its reward; None = could not be scored."""


class Bar:
    """Progress of a stage."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, steps: int = 1) -> None:
        """Count further steps."""
        self._progress.advance(self._task, steps)


class Terminal:
    """Writes to one stream (standard output unless given)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        out = stream or sys.stdout
        self.live = out.isatty()
        self._console = Console(
            file=out,
            force_terminal=self.live,
            color_system="auto" if self.live else None,
            width=None if self.live else _PLAIN_WIDTH,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._box = ROUNDED if self.live else ASCII2

    def banner(self, banner: Banner) -> None:
        """Experiment, resolved spec, device, batch arithmetic and output folder."""
        table = Table.grid(padding=(0, 2))
        for key, value in banner.spec.items():
            table.add_row(Text(key, style="dim"), printable(value))
        table.add_row(Text("device", style="dim"), printable(banner.device))
        for line in banner.batch:
            table.add_row(Text("batch", style="dim"), printable(line))
        table.add_row(Text("output", style="dim"), printable(banner.output))
        self._console.print(Panel(table, title=printable(banner.name), box=self._box, expand=False))

    @contextmanager
    def progress(self, description: str, total: int, done: int = 0) -> Iterator[Bar]:
        """A progress bar over `total` steps of which `done` are there already; silent when this is no terminal."""
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        progress = Progress(
            *columns, TimeElapsedColumn(), RemainingColumn(), console=self._console, disable=not self.live
        )
        with progress:
            yield Bar(progress, progress.add_task(printable(description), total=total, completed=done))

    def metrics(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """One line: the step and these values, in their order, four significant digits each."""
        parts = [f"step {step:>{len(str(total))}}/{total}"] + [f"{name} {value:.4g}" for name, value in values.items()]
        self._line("  ".join(parts))

    def samples(self, title: str, samples: Sequence[Sample]) -> None:
        """A table of sampled responses with rewards and advantages."""
        table = Table(title=Text(title), box=self._box, show_lines=True)
        table.add_column("prompt", ratio=2)
        table.add_column("response", ratio=3)
        table.add_column("reward", justify="right", no_wrap=True)
        table.add_column("advantage", justify="right", no_wrap=True)
        for sample in samples:
            reward, advantage = _number(sample.reward, "invalid"), _number(sample.advantage, "-")
            table.add_row(printable(sample.prompt), printable(sample.response), reward, advantage)
        self._console.print(table)

    def before_after(self, rows: Sequence[BeforeAfter], before: str = "before", after: str = "after") -> None:
        """The same prompts answered by two checkpoints, side by side, each answer with its reward."""
        table = Table(title=Text(f"{before} -> {after}"), box=self._box, show_lines=True)
        table.add_column("prompt", ratio=2)
        for name in (before, after):
            table.add_column(Text(name), ratio=3)
            table.add_column("reward", justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                printable(row.prompt),
                printable(row.before),
                _number(row.before_reward, "invalid"),
                printable(row.after),
                _number(row.after_reward, "invalid"),
            )
        self._console.print(table)

    def next_commands(self, commands: Sequence[tuple[str, str]]) -> None:
        """What to type next: (command, what it does); each command on a line of its own, never broken."""
        self._line("next:")
        for command, why in commands:
            self._line(f"  {command}    # {why}")

    def note(self, text: str) -> None:
        """One plain line."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(printable(text), soft_wrap=True)


def rl_batch(prompts: int, samples: int, updates: int, epochs: int, steps: int) -> str:
    """Batch arithmetic of a reinforcement-learning stage in one line."""
    optimizer = updates * epochs
    return (
        f"{steps} steps x ({prompts} prompts x {samples} samples = {prompts * samples} rollouts), "
        f"{updates} updates x {epochs} epochs = {optimizer} optimizer steps a step, {optimizer * steps} in all"
    )


def sft_batch(examples: int, steps: int) -> str:
    """Batch arithmetic of a supervised stage in one line."""
    return f"{steps} optimizer steps x {examples} examples = {steps * examples} examples"


def preference_batch(pairs: int, steps: int, *, unpaired: bool) -> str:
    """Batch arithmetic of a preference stage in one line."""
    what = "judged completions" if unpaired else "pairs"
    return f"{steps} optimizer steps x {pairs} {what} = {pairs * steps} {what}"


def pretrain_batch(rows: int, tokens: int | None, steps: int) -> str:
    """Batch arithmetic of a pretraining stage in one line."""
    if tokens is None:
        return f"{steps} optimizer steps x {rows} rows of the context's length"
    return f"{steps} optimizer steps x {rows} rows x {tokens} tokens = {steps * rows * tokens} tokens"


def sample_batch(tasks: int | None, samples: int, keep: int) -> str:
    """Batch arithmetic of a sample stage in one line."""
    return f"{'all' if tasks is None else tasks} prompts x {samples} samples, at most {keep} kept of each prompt"


def printable(text: str) -> str:
    """`text` with every control character but the line break shown as its escape, so that a sampled response cannot
    move the cursor or change colours."""
    return "".join(c if c == "\n" or unicodedata.category(c)[0] != "C" else ascii(c)[1:-1] for c in text)


def _number(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.3g}"
