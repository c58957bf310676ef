"""The curves of runs, and what tells runs apart."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import TrainingError
from ..evaluation.picture import COLOURS, save_picture
from .results import is_figure, read_log
from .run_folder import LOG_FILE

Records = Sequence[Mapping[str, Any]]

_PANELS = (
    ("loss", "loss (nats)"),
    ("learning_rate", "learning rate"),
    ("gradient_norm", "norm of the gradient"),
    ("tokens_per_second", "tokens a second"),
    ("zero_trits", "share of zero trits"),
    ("flipped_trits", "share of trits changed\nsince the start"),
)
_SHARES = ("zero_trits", "flipped_trits")


def plot_run(records: Records, name: str, image: Path) -> bool:
    """Draws all that a run has logged, over tokens, as PNG.

    There is a panel for the losses, the learning rate, the norm of the gradient, the speed and, of
    models that train ternary weights, the shares of zero and of changed trits in each layer.

    Args:
        records: The log of the run.
        name: The name of the run, for the title.
        image: The file.

    Returns:
        `False` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels = [panel for panel in _PANELS if panel[0] == "loss" or _points(records, panel[0])]
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(10, 1 + 2.6 * rows), dpi=120, layout="constrained")
    all_axes = figure.subplots(rows, min(len(panels), 2), squeeze=False, sharex=True)
    scale, unit = _token_scale([records])
    for axes, (key, label) in zip(all_axes.flat, panels, strict=False):
        if key in _SHARES:
            _draw_layers(figure, axes, records, key, scale)
        elif key == "loss":
            _draw_losses(axes, records, scale)
        else:
            axes.plot(*_scaled(_points(records, key), scale), color=COLOURS[0], linewidth=1)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    for axes in list(all_axes.flat)[len(panels) :]:
        axes.set_axis_off()
    for axes in all_axes[-1]:
        axes.set_xlabel(f"{unit} learned from")
    figure.suptitle(_title(records, name))
    save_picture(figure, image)
    return True


def plot_runs(runs: Mapping[str, Records], image: Path) -> None:
    """Draws the losses of several runs over tokens in one picture, as PNG.

    Args:
        runs: Their logs by their names.
        image: The file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    scale, unit = _token_scale(list(runs.values()))
    for axes, (key, label) in zip(
        panels, (("loss", "training"), ("valid_loss", "validation")), strict=True
    ):
        for number, (name, records) in enumerate(runs.items()):
            points = _points(records, key)
            style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
            marker = "o" if key == "valid_loss" else ""
            colour = COLOURS[number % len(COLOURS)]
            if points:
                axes.plot(
                    *_scaled(points, scale),
                    style,
                    marker=marker,
                    markersize=3,
                    label=name,
                    color=colour,
                    linewidth=1,
                )
        axes.set(xlabel=f"{unit} learned from", title=f"{label} loss")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    panels[0].set_ylabel("loss (nats)")
    save_picture(figure, image)


def _draw_losses(axes: Any, records: Records, scale: float) -> None:
    for colour, (key, label, style) in zip(
        COLOURS, (("loss", "training", "-"), ("valid_loss", "validation", "o-")), strict=False
    ):
        if points := _points(records, key):
            axes.plot(
                *_scaled(points, scale), style, label=label, color=colour, markersize=4, linewidth=1
            )
    if axes.lines:
        axes.legend()


def _draw_layers(figure: Any, axes: Any, records: Records, key: str, scale: float) -> None:
    """A line for each layer, in the colour of its index."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    points = _points(records, key)
    layers = min(len(shares) for _, shares in points)
    colours, depth = colormaps["viridis"], Normalize(1, max(layers, 2))
    tokens = [at / scale for at, _ in points]
    for layer in range(layers):
        shares = [values[layer] for _, values in points]
        axes.plot(
            tokens, shares, ".-", color=colours(depth(layer + 1)), linewidth=0.8, markersize=3
        )
    figure.colorbar(ScalarMappable(depth, colours), ax=axes, label="matrix, as the log lists them")


def _points(records: Records, key: str) -> list[tuple[int, Any]]:
    """Tokens and values of the records that have such a value, or a list of them."""
    return [
        (record["tokens"], record[key])
        for record in records
        if is_figure(record.get("tokens")) and _is_drawable(record.get(key))
    ]


def _is_drawable(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(is_figure, value))
    return is_figure(value)


def _scaled(points: Sequence[tuple[int, Any]], scale: float) -> tuple[list[float], list[Any]]:
    return [tokens / scale for tokens, _ in points], [value for _, value in points]


def _token_scale(runs: Sequence[Records]) -> tuple[float, str]:
    tokens = [record.get("tokens", 0) for records in runs for record in records]
    return token_unit(max([at for at in tokens if is_figure(at)], default=0))


def _title(records: Records, name: str) -> str:
    title = f"Run '{name}'"
    measured = _points(records, "valid_loss")
    if measured:
        tokens, loss = min(measured, key=lambda point: point[1])
        scale, unit = _token_scale([records])
        title += f": validation loss {loss:.3f} at best, after {tokens / scale:.3g} {unit}"
    return title


def token_unit(most: int) -> tuple[float, str]:
    """The unit in which numbers up to `most` have one to four digits."""
    units = {1: "tokens", 1e3: "thousand tokens", 1e6: "million tokens", 1e9: "billion tokens"}
    size = max((size for size in units if most >= 2 * size), default=1)
    return size, units[size]


@dataclass(frozen=True)
class RunSummary:
    """The run as its log describes it. A figure is `None` where the log has none.

    Attributes:
        name: How the run was named.
        records: The log.
        steps: Steps done.
        tokens: Tokens learned from.
        loss: The last training loss, in nats.
        best_loss: The best validation loss, in nats.
        best_step: The step that it was measured at.
        tokens_per_second: The median of the reports.
        peak_memory_bytes: The largest of the reports.
        settings: The settings of the run.
    """

    name: str
    records: Sequence[Mapping[str, Any]]
    steps: int
    tokens: int
    loss: float | None
    best_loss: float | None
    best_step: int | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    settings: Mapping[str, Any]


def read_run(path: Path) -> RunSummary:
    """Reads the log of a run.

    Args:
        path: The folder of the run, or its log.

    Raises:
        TrainingError: There is no log, or it holds no run.
    """
    file = path if path.is_file() else path / LOG_FILE
    if not file.is_file():
        raise TrainingError(
            f"[runs] '{path}' must be the folder of a run but has no {LOG_FILE}. Give the folder that "
            "'output' or 'adapter_path' names."
        )
    records = read_log(file)
    if not records:
        raise TrainingError(f"[runs] '{file}' must be the log of a run but its first line is not.")
    # a log file's folder tells more than its name
    name = path.stem if path.is_file() and path.name != LOG_FILE else file.resolve().parent.name
    losses = _values(records, "loss")
    speeds, peaks = _values(records, "tokens_per_second"), _values(records, "peak_memory_bytes")
    measured = [
        (record["valid_loss"], record["step"])
        for record in records
        if is_figure(record.get("valid_loss")) and is_figure(record.get("step"))
    ]
    best = min(measured, default=(None, None))
    settings = records[0].get("settings")
    return RunSummary(
        name=name,
        records=records,
        steps=int(max(_values(records, "step"), default=0)),
        tokens=int(max(_values(records, "tokens"), default=0)),
        loss=losses[-1] if losses else None,
        best_loss=best[0],
        best_step=best[1],
        tokens_per_second=median(speeds) if speeds else None,
        peak_memory_bytes=int(max(peaks)) if peaks else None,
        settings=settings if isinstance(settings, dict) else {},
    )


def distinct_names(paths: Sequence[Path], runs: Sequence[RunSummary]) -> list[str]:
    """A name for each run: its folder's, or the path where several folders have the same."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def differing_settings(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """The settings that the runs do not share, as JSON; `-` where a run has none.

    Settings within a mapping have names such as `model.hidden_size`.
    """
    each = [_flat(run.settings) for run in runs]
    names = sorted({name for settings in each for name in settings})
    found = {name: [settings.get(name, "-") for settings in each] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value, sort_keys=True)
    return flat


def _values(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if is_figure(record.get(key))]
