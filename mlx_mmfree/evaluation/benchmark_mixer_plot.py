"""The picture of mixers: time and memory against the length or size, with fitted slopes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .benchmark_mixers import BACKWARD, DECODING, FORWARD, MixerReport, slope
from .picture import COLOURS, save_picture

_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_UNITS = {"time": "ms", "memory": "MB"}
_FACTORS = {"time": 1e3, "memory": 1e-6}

Values = Mapping[str, Mapping[int, float | None]]


def plot_mixers(report: MixerReport, file: Path) -> None:
    """Draws time and memory of each mixer against the length, and the time of a decoded token, as PNG.

    Needs the package `matplotlib`.

    Args:
        report: What was measured.
        file: The file, which is replaced as a whole.

    Raises:
        ImportError: `matplotlib` is not installed.
    """
    from matplotlib.figure import Figure

    clock = report.clock
    is_spatial = report.settings["is_spatial"]
    size = "places of the map" if is_spatial else "length (tokens)"
    kinds = {"time": clock, "memory": "peak_bytes"}
    kind = "processor time" if clock == "processor_seconds" else "time"
    mixers = list({cell.mixer: None for cell in report.cells})
    canvas = Figure(figsize=(17, 10), dpi=110, layout="constrained")
    panels = canvas.subplots(2, 3, squeeze=False)
    for column, work in enumerate((FORWARD, BACKWARD)):
        for row, (what, name) in enumerate(kinds.items()):
            values = report.values(work, name)
            title = f"{work}: {kind if what == 'time' else 'peak memory'}"
            _draw(panels[row][column], mixers, values, what, title, size)
    decoding = report.values(DECODING, clock)
    title = f"decoding a token: {kind}"
    if is_spatial:
        panels[0][2].axis("off")
    else:
        _draw(panels[0][2], mixers, decoding, "time", title, "position (tokens before)")
    _draw_legend(panels[1][2], mixers, report)
    settings = report.settings
    kinds_of_mixers = "Spatial mixers" if is_spatial else "Token mixers"
    canvas.suptitle(
        f"{kinds_of_mixers} of {settings['dims']} dims on {report.machine['device']}: what a "
        f"{'place' if is_spatial else 'length'} costs"
    )
    save_picture(canvas, file)


def _style(number: int) -> dict[str, Any]:
    """Colour, line and marker, together of no other mixer."""
    turn = number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _LINES[turn % len(_LINES)],
        "marker": _MARKERS[turn % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.3,
    }


def _draw(axes: Any, mixers: list[str], values: Values, what: str, title: str, xlabel: str) -> None:
    lengths = sorted({length for own in values.values() for length in own})
    for number, mixer in enumerate(mixers):
        points = [(n, y) for n, y in sorted(values.get(mixer, {}).items()) if y]
        if points:
            x = [n for n, _ in points]
            axes.plot(x, [y * _FACTORS[what] for _, y in points], **_style(number))
    axes.set(
        xscale="log", yscale="log", title=title, xlabel=xlabel, ylabel=f"{what} ({_UNITS[what]})"
    )
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)


def _draw_legend(axes: Any, mixers: list[str], report: MixerReport) -> None:
    """The styles, and the powers of the length with which each panel grows."""
    columns = [
        report.values(work, name)
        for name in (report.clock, "peak_bytes")
        for work in (FORWARD, BACKWARD)
    ]
    for number, mixer in enumerate(mixers):
        powers = [slope(values.get(mixer, {})) for values in columns]
        texts = [f"{'-' if power is None else f'{power:.2f}':>6}" for power in powers]
        axes.plot([], [], label=f"{mixer:<25}{''.join(texts)}", **_style(number))
    axes.axis("off")
    legend = axes.legend(
        title=f"{'':<7}slopes fitted over the greatest lengths\n"
        f"{'':<32}{'time':>12}{'memory':>12}\n{'':<32}{'fwd':>6}{'+bwd':>6}{'fwd':>6}{'+bwd':>6}",
        loc="center",
        ncols=1,
        prop={"family": "monospace", "size": 7.5},
        title_fontproperties={"family": "monospace", "size": 7.5},
        handlelength=4,
        labelspacing=0.1,
        alignment="left",
    )
    # else the panels beside it shrink
    legend.set_in_layout(False)
