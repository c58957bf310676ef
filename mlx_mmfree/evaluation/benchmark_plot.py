"""The roofline: what memory and arithmetic allow, with the measured figures as points."""

from pathlib import Path

from ..files.replacing import new_file
from .benchmark import Report

_DECADES = (0.5, 5000.0)


def plot_roofline(report: Report, file: Path) -> None:
    """Draws a PNG; needs `matplotlib`.

    Args:
        report: With the machine's limits and the figures.
        file: Where to; replaced as a whole.

    Raises:
        ImportError: `matplotlib` is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(10, 6), layout="constrained")
    axes = canvas.subplots()
    for threads, limits in report.machine.get("limits", {}).items():
        bandwidth = limits["bytes_per_second"]
        peak = limits["macs_per_second"] or bandwidth * _DECADES[1]
        corner = peak / bandwidth
        x = [_DECADES[0], min(corner, _DECADES[1]), _DECADES[1]]
        y = [min(bandwidth * intensity, peak) / 1e9 for intensity in x]
        axes.plot(x, y, label=f"limit, {threads} thread(s)")
    for number, figure in enumerate((f for f in report.figures if f.records[0].bytes), 1):
        record = figure.records[0]
        intensity, rate = record.macs / record.bytes, record.macs / figure.seconds / 1e9
        label = f"{number}  {record.name}, {record.threads} thread(s): {figure.share:.0%}"
        axes.plot([intensity], [rate], "o", label=label)
        axes.annotate(str(number), (intensity, rate), textcoords="offset points", xytext=(4, 4))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="multiply-accumulates for each byte of weights",
        ylabel="10⁹ multiply-accumulates a second",
        title=report.machine.get("device", ""),
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    with new_file(file) as new, new.open("wb") as target:
        FigureCanvasAgg(canvas).print_png(target)
