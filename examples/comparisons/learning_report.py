"""The learning table as Markdown, JSON and a picture."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_mmfree.evaluation.picture import COLOURS, save_picture
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.files.writing import new_file

from .learning_runs import LINEARS, Plan, Row, Run, rows_of
from .models import REFERENCE
from .runs import Metrics, markdown, mean_and_spread
from .tasks import Task

_SOLVED = 0.99
"""The share of the answers that softmax attention must give for a generated task to count."""

_FORMATS = {
    "MLGRU": "ternary MatMul-free model",
    "positions": "positions of softmax attention",
}
"""The ablations that are one value a format, and what their formats are."""

Results = Mapping[Run, Metrics]


def write_report(folder: Path, plan: Plan, best: Sequence[Run], results: Results) -> str:
    """Writes the tables, all metrics and the picture. Returns the tables as Markdown.

    Args:
        folder: The folder that gets them.
        plan: The plan of the runs.
        best: The run of each row that has the best rate, with the first seed.
        results: What the runs that are finished came to.
    """
    chosen = {run.row: run for run in best}
    parts = [
        _state(plan, results),
        *(_main_table(plan, linear, chosen, results) for linear in plan.linears),
        _verdicts(plan, chosen, results),
    ]
    parts += [
        _format_table(part, heading, plan, chosen, results)
        for part, heading in _FORMATS.items()
        if part in plan.ablations
    ]
    if "sinks" in plan.ablations:
        parts.append(_sinks_table(plan, chosen, results))
    if "hybrids" in plan.ablations:
        parts.append(_hybrids_table(plan, chosen, results))
    text = "\n\n".join(part for part in parts if part) + "\n"
    with new_file(folder / "table.md") as new:
        new.write_text(text)
    write_json(folder / "table.json", {"runs": _metrics(chosen, results)})
    _draw(folder / "table.png", plan, chosen, results)
    return text


def _state(plan: Plan, results: Results) -> str:
    rows = len(rows_of(plan))
    planned = rows * (len(plan.rates) + plan.seeds - 1)
    tried = sum(run.seed == 0 for run in results)
    if len(results) == planned:
        return (
            f"All {planned} runs are finished: {tried} of the search for rates, and {planned - tried} "
            "with further seeds."
        )
    return (
        f"{len(results)} of {planned} runs are finished: {tried} of {rows * len(plan.rates)} of the "
        f"search for rates, and {len(results) - tried} with further seeds. A value without a spread is "
        "from one seed."
    )


def _runs(run: Run, results: Results) -> list[Metrics]:
    """The metrics of a run with each seed."""
    same = [metrics for other, metrics in results.items() if replace(other, seed=run.seed) == run]
    return [metrics for metrics in same if metrics["value"] is not None]


def _cell(run: Run | None, results: Results) -> str:
    if run is None:
        return "-"
    values = [metrics["value"] for metrics in _runs(run, results)]
    if run.row.task.is_generated:
        return mean_and_spread([100 * value for value in values], digits=1)
    return mean_and_spread(values)


def _heading(task: Task) -> str:
    return f"{task.name}, %" if task.is_generated else "bits per character"


def _speed(run: Run | None, results: Results) -> str:
    """The median speed of the runs with a row's best rate, one of each seed, where it was measured."""
    name = "tokens_per_second"
    speeds = [found[name] for found in _runs(run, results) if name in found] if run else []
    return f"{statistics.median(speeds):,.0f}" if speeds else "-"


def _main_table(plan: Plan, linear: str, chosen: Mapping[Row, Run], results: Results) -> str:
    text = next((task for task in plan.tasks if not task.is_generated), None)
    header = [f"{linear} mixer", *map(_heading, plan.tasks), *(["tokens/s"] if text else [])]
    rows = []
    for mixer in plan.mixers:
        runs = [chosen.get(Row("table", task, mixer, linear)) for task in plan.tasks]
        cells = [mixer, *(_cell(run, results) for run in runs)]
        if text is not None:
            cells.append(_speed(chosen.get(Row("table", text, mixer, linear)), results))
        rows.append(cells)
    return markdown(header, rows) if plan.tasks else ""


def _verdicts(plan: Plan, chosen: Mapping[Row, Run], results: Results) -> str:
    """Which of the generated tasks softmax attention fails, so that they say little."""
    lines = []
    for task in plan.tasks:
        run = chosen.get(Row("table", task, REFERENCE, "dense"))
        if not task.is_generated or run is None:
            continue
        share = statistics.mean(metrics["value"] for metrics in _runs(run, results))
        if share < _SOLVED:
            lines.append(
                f"`{task.name}` does not count: softmax attention gives {share:.1%} of the answers."
            )
    return "\n".join(lines)


def _format_table(
    part: str, heading: str, plan: Plan, chosen: Mapping[Row, Run], results: Results
) -> str:
    rows = [
        [row.model, _rate(chosen.get(row)), _cell(chosen.get(row), results)]
        for row in rows_of(plan)
        if row.part == part
    ]
    return markdown([heading, "rate", "bits per character"], rows)


def _rate(run: Run | None) -> str:
    return "-" if run is None else f"{run.rate:g}"


def _sinks_table(plan: Plan, chosen: Mapping[Row, Run], results: Results) -> str:
    """Perplexities of characters: of chunks as long as those learned from, and of the long text."""
    rows = []
    for row in rows_of(plan):
        run = chosen.get(row)
        if row.part != "sinks" or run is None:
            continue
        found = _runs(run, results)
        short = mean_and_spread([2 ** metrics["value"] for metrics in found])
        for name in found[0]["long"]:
            values = [2 ** metrics["long"][name] for metrics in found]
            rows.append([row.model, name, short, mean_and_spread(values)])
    header = ["learned to see", "sees", "perplexity of chunks", "of the long text"]
    return markdown(header, rows) if rows else ""


def _hybrids_table(plan: Plan, chosen: Mapping[Row, Run], results: Results) -> str:
    """A column for each task and kind of linears of which a run is finished."""
    found: dict[str, dict[str, str]] = {}
    for row in rows_of(plan):
        if row.part == "hybrids" and row in chosen:
            cells = found.setdefault(row.model, {})
            cells[f"{_heading(row.task)}, {row.linear}"] = _cell(chosen[row], results)
    header = list(dict.fromkeys(name for cells in found.values() for name in cells))
    rows = [[model, *(cells.get(name, "-") for name in header)] for model, cells in found.items()]
    return markdown(["blocks", *header], rows) if rows else ""


def _metrics(chosen: Mapping[Row, Run], results: Results) -> list[dict[str, Any]]:
    return [
        {
            "part": run.row.part,
            "task": run.row.task.name,
            "model": run.row.model,
            "linear": run.row.linear,
            "learning_rate": run.rate,
            "seed": run.seed,
            "is_best_rate": run.row in chosen and chosen[run.row].rate == run.rate,
            **{name: value for name, value in metrics.items() if name != "losses"},
        }
        for run, metrics in results.items()
    ]


def _points(
    plan: Plan,
    task: Task,
    linear: str,
    shift: float,
    chosen: Mapping[Row, Run],
    results: Results,
) -> list[tuple[float, float, float]]:
    """Mean, position on the axis and deviation of each mixer that has run."""
    points = []
    for index, mixer in enumerate(plan.mixers):
        run = chosen.get(Row("table", task, mixer, linear))
        if run is not None:
            scale = 100 if task.is_generated else 1
            values = [scale * metrics["value"] for metrics in _runs(run, results)]
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            points.append((statistics.mean(values), index + shift, spread))
    return points


def _draw(file: Path, plan: Plan, chosen: Mapping[Row, Run], results: Results) -> None:
    """Draws each mixer's value on each task, with dense and with ternary linears."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No picture was drawn, because matplotlib is not installed.")
        return
    count = max(len(plan.tasks), 1)
    figure = Figure(
        figsize=(3 * count + 2, 0.27 * len(plan.mixers) + 1.4), dpi=120, layout="constrained"
    )
    all_axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for axes, task in zip(all_axes, plan.tasks, strict=False):
        for linear, colour, marker, shift in zip(
            LINEARS, COLOURS, "o^", (-0.15, 0.15), strict=False
        ):
            points = _points(plan, task, linear, shift, chosen, results)
            if points and linear in plan.linears:
                x, y, spreads = zip(*points, strict=True)
                style = {"color": colour, "markersize": 5, "capsize": 2, "label": linear}
                axes.errorbar(x, y, xerr=spreads, fmt=marker, **style)
        axes.set_title(task.name)
        axes.set_xlabel(
            "right answers (%)" if task.is_generated else "bits per character (less is better)"
        )
        if task.is_generated:
            axes.set_xlim(-4, 104)
        axes.grid(alpha=0.3)
    all_axes[0].set_yticks(range(len(plan.mixers)), plan.mixers)
    all_axes[0].invert_yaxis()
    handles = [axes.get_legend_handles_labels() for axes in all_axes]
    by_label = {name: handle for pair in handles for handle, name in zip(*pair, strict=True)}
    if by_label:
        figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=2)
    figure.suptitle("Causal token mixers at equal parameters (mean and deviation over seeds)")
    save_picture(figure, file)
