"""Curves over steps as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_curves(
    path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str, y_label: str = "reward"
) -> None:
    """Write a PNG with one line a curve: {legend: [(step, value), ..]}. Needs no display.

    Raises ValueError if no curve has a point, OSError if the file cannot be written.
    """
    if not any(curves.values()):
        raise ValueError(f"nothing to plot in {path.name}: {sorted(curves)} have no points")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy: only when something is plotted
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, marker="." if len(points) < 40 else None)
    axes.set(title=title, xlabel="step", ylabel=y_label)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))
