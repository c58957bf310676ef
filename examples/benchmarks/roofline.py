"""The roofline: the speed that memory and arithmetic allow, with the measured metrics as points."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_mmfree.evaluation.benchmark import Figure
from mlx_mmfree.evaluation.picture import COLOURS, save_picture

_DECADES = (0.5, 5000.0)
_KINDS = {
    "ternary": ("ternary product", "o"),
    "MLX": ("product of MLX", "D"),
    "head": ("head", "s"),
    "prefill": ("reading a prompt", "^"),
    "decode": ("decoding", "v"),
    "training": ("training step", "P"),
}
_DIRECTIONS = ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1.4), (1.6, 0), (0, -1.4), (-1.6, 0))
_LINES = ("-", "--", "-.", ":")


def plot_roofline(machine: Mapping[str, Any], measured: Sequence[Figure], file: Path) -> None:
    """Draws the roofline as PNG. Needs the package `matplotlib`.

    Args:
        machine: Its `device` and `limits`.
        measured: The metrics.
        file: The file, which is replaced as a whole.

    Raises:
        ImportError: `matplotlib` is not installed.
    """
    from matplotlib.figure import Figure as Canvas

    shown = [figure for figure in measured if figure.records[0].bytes]
    shown.sort(key=lambda figure: [*_KINDS, ""].index(_kind(figure)))
    rows = max(len(shown) + len(_KINDS) + 4, 20)
    canvas = Canvas(figsize=(12, max(6, 0.17 * rows)), dpi=120, layout="constrained")
    axes = canvas.subplots()
    _draw_limits(axes, machine.get("limits", {}))
    points = _draw_points(axes, shown)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="arithmetic intensity (multiply-accumulates per byte of weights)",
        ylabel="speed (10⁹ multiply-accumulates per second)",
        title=f"Roofline of {machine.get('device') or 'this machine'}: "
        "measured speed below what memory and arithmetic allow",
    )
    axes.margins(0.08)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    # the pixels of the points are known only after the layout
    canvas.draw_without_rendering()
    label_points(axes, points, [str(number) for number in range(1, len(points) + 1)])
    save_picture(canvas, file)


def _draw_limits(axes: Any, limits: dict[str, Any]) -> None:
    for number, (threads, limit) in enumerate(limits.items()):
        bandwidth = limit["bytes_per_second"]
        peak = limit["macs_per_second"] or bandwidth * _DECADES[1]
        corner = min(peak / bandwidth, _DECADES[1])
        x = [_DECADES[0], corner, _DECADES[1]]
        axes.plot(
            x,
            [min(bandwidth * intensity, peak) / 1e9 for intensity in x],
            color="0.4",
            linestyle=_LINES[number % len(_LINES)],
            label=f"limit with {_threads(int(threads))}",
        )


def _draw_points(axes: Any, measured: Sequence[Figure]) -> list[tuple[float, float]]:
    """Draws a mark for each figure, with shape and colour by kind, and hollow for one thread."""
    points, seen = [], set()
    for number, figure in enumerate(measured, 1):
        record = figure.records[0]
        kind = _kind(figure)
        title, marker = _KINDS.get(kind, ("other", "x"))
        colour = COLOURS[[*_KINDS, ""].index(kind)]
        point = (record.macs / record.bytes, record.macs / figure.seconds / 1e9)
        fill = "white" if record.threads == 1 and marker != "x" else colour
        style = {"color": colour, "markerfacecolor": fill, "markersize": 5}
        axes.plot([point[0]], [point[1]], marker, **style)
        if kind not in seen:
            axes.plot([], [], marker, color=colour, label=f"{title} (hollow: 1 thread)")
            seen.add(kind)
        points.append(point)
        text = f"{number}  {record.name}, {_threads(record.threads)}: {figure.share:.0%}"
        axes.plot([], [], " ", label=f"{text} of {record.limit}")
    return points


def _kind(figure: Figure) -> str:
    """The kind of what was measured, a key of `_KINDS`, or an empty text."""
    name = figure.records[0].name.split(": ")[-1]
    return next((word for word in _KINDS if word in name), "")


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}" if count else "the GPU"


def label_points(axes: Any, points: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Writes a label beside each point, so that it covers no point and no other label.

    A line connects a label with its point if there is no free space nearby.

    Args:
        axes: The matplotlib axes, whose limits and scales must be set before.
        points: The points, in the units of the axes.
        labels: A short text for each point.
    """
    pixels = [tuple(axes.transData.transform(point)) for point in points]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in pixels]
    for point, (x, y), label in zip(points, pixels, labels, strict=True):
        text = axes.annotate(
            label,
            point,
            xytext=(0, 0),
            textcoords="offset pixels",
            ha="center",
            va="center",
            fontsize="x-small",
        )
        extent = text.get_window_extent()
        width, height = extent.width, extent.height
        for distance in range(10, 200, 5):
            spots = [
                (x + distance * right - width / 2, y + distance * up - height / 2)
                for right, up in _DIRECTIONS
            ]
            boxes = [(left, low, left + width, low + height) for left, low in spots]
            free = [box for box in boxes if not any(_overlap(box, other) for other in taken)]
            if free:
                break
        box = free[0] if free else boxes[0]
        taken.append(box)
        centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        text.set_position((centre[0] - x, centre[1] - y))
        if distance > 20:
            ends = axes.transData.inverted().transform([centre, (x, y)])
            axes.plot(*ends.T, color="0.6", linewidth=0.5, zorder=0)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
