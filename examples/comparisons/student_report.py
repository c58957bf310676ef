"""The table of students, twins and what was left out, as Markdown, JSON and a picture."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_mmfree.evaluation.picture import COLOURS, save_picture
from mlx_mmfree.files.json_file import write_json
from mlx_mmfree.files.replacing import new_file

from .runs import Figures, markdown, mean_and_spread
from .student_runs import DISTILLED, TWIN, WAYS, Plan, Run, left_out

Results = Mapping[Run, Figures]
Chosen = dict[tuple[str, str], list[Figures]]


def write_report(
    folder: Path,
    plan: Plan,
    teacher: Figures,
    rates: Mapping[tuple[str, str], float],
    results: Results,
) -> str:
    """Writes the table, all figures and the picture. Returns the table as Markdown.

    Args:
        folder: The folder that gets them.
        plan: The plan of the runs.
        teacher: The teacher's figures.
        rates: The best rate of each kind and way.
        results: What the runs that are finished came to.
    """
    chosen: Chosen = {}
    for run, figures in results.items():
        family = TWIN if run.way.startswith(TWIN) else DISTILLED
        if rates.get((run.kind, family)) == run.rate and figures["value"] is not None:
            chosen.setdefault((run.kind, run.way), []).append(figures)
    text = "\n\n".join(
        [_teacher(teacher), _students(plan, teacher, chosen), _left_out(plan, chosen)]
    )
    with new_file(folder / "table.md") as new:
        new.write_text(text + "\n")
    runs = [{**vars(run), **values} for run, values in results.items()]
    write_json(folder / "table.json", {"teacher": teacher, "runs": runs})
    _draw(folder / "table.png", plan, teacher, chosen)
    return text


def _teacher(teacher: Figures) -> str:
    return (
        f"The teacher has {teacher['value']:.3f} bits per byte and recalls "
        f"{teacher['recall']:.1%} of the answers."
    )


def _students(plan: Plan, teacher: Figures, chosen: Chosen) -> str:
    header = ["student", *(f"bits per byte, {way}" for way in WAYS), "of the gap closed"]
    header += ["recall, distilled", "recall, twin", "seconds, distilled"]
    rows = []
    for kind in plan.kinds:
        runs = [chosen.get((kind, way), []) for way in WAYS]
        cells = [kind, *map(_cell, runs), _closed(teacher, *runs[:2])]
        cells += [_cell(each, "recall", 100, 1) for each in runs[:2]]
        rows.append([*cells, _cell(runs[0], "seconds", 1, 0)])
    return markdown(header, rows)


def _cell(runs: list[Figures], name: str = "value", scale: float = 1.0, digits: int = 3) -> str:
    return mean_and_spread([scale * each[name] for each in runs], digits) if runs else "-"


def _closed(teacher: Figures, students: list[Figures], twins: list[Figures]) -> str:
    """How much of the way from the twin to the teacher the student has made."""
    if not students or not twins:
        return "-"
    student, twin = (statistics.mean(each["value"] for each in runs) for runs in (students, twins))
    return f"{(twin - student) / (twin - teacher['value']):.0%}"


def _left_out(plan: Plan, chosen: Chosen) -> str:
    rows = []
    for kind in plan.kinds:
        for way in (DISTILLED, *left_out(plan, kind)):
            runs = chosen.get((kind, way), [])
            rows.append([kind, way, _cell(runs), _cell(runs, "recall", 100, 1)])
    return markdown(["student", "way", "bits per byte", "recall, %"], rows)


def _draw(file: Path, plan: Plan, teacher: Figures, chosen: Chosen) -> None:
    """Draws the bits per byte of each kind in each way, with the teacher as a line."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No picture was drawn, because matplotlib is not installed.")
        return
    figure = Figure(figsize=(7, 0.45 * len(plan.kinds) + 1.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for way, colour, marker, shift in zip(WAYS, COLOURS, "o^s", (-0.2, 0.0, 0.2), strict=False):
        points = []
        for place, kind in enumerate(plan.kinds):
            values = [each["value"] for each in chosen.get((kind, way), [])]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                points.append((statistics.mean(values), place + shift, spread))
        if points:
            x, y, spreads = zip(*points, strict=True)
            style: dict[str, Any] = {"color": colour, "markersize": 5, "capsize": 2, "label": way}
            axes.errorbar(x, y, xerr=spreads, fmt=marker, **style)
    axes.axvline(teacher["value"], color="black", linestyle="--", label="teacher")
    axes.set_yticks(range(len(plan.kinds)), plan.kinds)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte of held-out stories")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle("Students of one teacher (mean and deviation over seeds)")
    save_picture(figure, file)
