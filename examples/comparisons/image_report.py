"""The table of images as Markdown, JSON and a picture."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_mmfree.evaluation.picture import COLOURS, save_picture
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.files.writing import new_file

from .image_runs import LINEARS, TERNARIZED, Plan, Row, Run, rows_of
from .runs import Metrics, markdown, mean_and_spread

Results = Mapping[Run, Metrics]

_KINDS = (*LINEARS, TERNARIZED)


def write_report(folder: Path, plan: Plan, best: Mapping[Row, Run], results: Results) -> str:
    """Writes the table, all metrics and the picture. Returns the table as Markdown.

    Args:
        folder: The folder that gets them.
        plan: The plan of the runs.
        best: The run of each row that has the best rate, with the first seed.
        results: What the runs that are finished came to.
    """
    chosen = {row: _same(run, results) for row, run in best.items()}
    for run in results:
        if run.row.linear == TERNARIZED:
            chosen[run.row] = _same(replace(run, seed=0), results)
    text = f"{_state(plan, results)}\n\n{_table(plan, chosen)}\n\n{_recovery(plan, chosen)}\n"
    with new_file(folder / "table.md") as new:
        new.write_text(text)
    write_json(folder / "table.json", {"runs": _metrics(results)})
    _draw(folder / "table.png", plan, chosen)
    return text


def _same(run: Run, results: Results) -> list[Metrics]:
    """The metrics of a run with each seed."""
    return [
        metrics
        for other, metrics in results.items()
        if replace(other, seed=run.seed) == run and metrics["value"] is not None
    ]


def _state(plan: Plan, results: Results) -> str:
    rows = len(rows_of(plan))
    planned = rows * (len(plan.rates) + plan.seeds - 1) + len(plan.backbones) * plan.seeds
    return (
        f"{len(results)} of {planned} runs are finished. A value without a spread is from one seed. "
        "Speeds are those of the fastest of ten batches of 64 images, in float32, with ternary "
        "matrices packed."
    )


def _cell(runs: list[Metrics], name: str = "value") -> str:
    if not runs:
        return "-"
    return mean_and_spread([100 * metrics[name] for metrics in runs], digits=1)


def _table(plan: Plan, chosen: Mapping[Row, list[Metrics]]) -> str:
    header = ["backbone", "parameters"]
    header += [f"right, %, {linear}" for linear in LINEARS]
    header += [f"bits per weight, {linear}" for linear in LINEARS]
    header += [f"images/s, {linear}" for linear in LINEARS]
    rows = []
    for backbone in plan.backbones:
        runs = [chosen.get(Row(backbone, linear), []) for linear in LINEARS]
        counts = {f"{metrics['parameters']:,}" for each in runs for metrics in each}
        cells = [backbone, ", ".join(sorted(counts)) or "-", *map(_cell, runs)]
        cells += [f"{each[0]['bits_per_weight']:.2f}" if each else "-" for each in runs]
        speeds = [[metrics["images_per_second"] for metrics in each] for each in runs]
        rows.append([*cells, *(f"{max(each):,.0f}" if each else "-" for each in speeds)])
    return markdown(header, rows)


def _recovery(plan: Plan, chosen: Mapping[Row, list[Metrics]]) -> str:
    header = [
        "backbone",
        "dense, %",
        "made ternary, %",
        "after training on, %",
        "ternary from the start, %",
    ]
    rows = []
    for backbone in plan.backbones:
        dense, ternary, made = (
            chosen.get(Row(backbone, kind), []) for kind in ("dense", "ternary", TERNARIZED)
        )
        rows.append([backbone, _cell(dense), _cell(made, "at_once"), _cell(made), _cell(ternary)])
    words = (
        f"A dense model that is made ternary, and learns on for {plan.recovery_steps} steps of "
        f"{plan.batch_size} images:"
    )
    return f"{words}\n\n{markdown(header, rows)}"


def _metrics(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "backbone": run.row.backbone,
            "linear": run.row.linear,
            "rate": run.rate,
            "seed": run.seed,
            **metrics,
        }
        for run, metrics in results.items()
    ]


def _draw(file: Path, plan: Plan, chosen: Mapping[Row, list[Metrics]]) -> None:
    """Draws the accuracy of each backbone with each kind of linears."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No picture was drawn, because matplotlib is not installed.")
        return
    figure = Figure(figsize=(7, 0.4 * len(plan.backbones) + 1.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    shifts = (-0.2, 0.0, 0.2)
    for linear, colour, marker, shift in zip(_KINDS, COLOURS, "o^s", shifts, strict=False):
        points = []
        for index, backbone in enumerate(plan.backbones):
            values = [100 * each["value"] for each in chosen.get(Row(backbone, linear), [])]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                points.append((statistics.mean(values), index + shift, spread))
        if points:
            x, y, spreads = zip(*points, strict=True)
            style: dict[str, Any] = {
                "color": colour,
                "markersize": 5,
                "capsize": 2,
                "label": linear,
            }
            axes.errorbar(x, y, xerr=spreads, fmt=marker, **style)
    axes.set_yticks(range(len(plan.backbones)), plan.backbones)
    axes.invert_yaxis()
    axes.set_xlabel("images of MNIST sorted rightly (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle("Tiny backbones (mean and deviation over seeds)")
    save_picture(figure, file)
