"""The picture of the errors of windows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...evaluation.picture import COLOURS, save_picture


def draw_errors(records: Sequence[Mapping[str, Any]], image: Path) -> None:
    """Draws the error of each window over its layers, before and after it was trained.

    Without matplotlib it draws nothing.

    Args:
        records: The log of a run.
        image: The file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    lines = {
        "before": "held-out samples, rounded",
        "after": "held-out samples, trained",
        "learned": "samples learned from",
    }
    for (key, words), colour in zip(lines.items(), COLOURS, strict=False):
        for number, record in enumerate(records):
            first, last = record["layers"]
            ends = [first - 0.4, last + 0.4]
            label = words if number == 0 else None
            axes.plot(ends, [record[key]] * 2, color=colour, linewidth=2, label=label)
    axes.set_xlabel("layer")
    axes.set_ylabel("squared error over variance")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, image)
