"""The tables of students, twins and what was left out, what they show as text, and a picture."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_mmfree.evaluation.picture import COLOURS, save_picture
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.files.writing import new_file

from .recall_text import VALUES
from .runs import Metrics, markdown, mean_and_spread
from .student_runs import (
    DISTILLED,
    HYBRID,
    LONGER_TWIN,
    MAIN,
    TWIN,
    WAYS,
    Plan,
    Run,
    left_out,
    number_of_runs,
)

Results = Mapping[Run, Metrics]
Chosen = dict[tuple[str, str], list[Metrics]]

CHANCE = 1 / len(VALUES)
"""The share of the answers that guessing finds."""
LEAST_LEAD = 0.1
"""How far the teacher must be below a twin, in bits per byte, for the comparison to say much."""
LEAST_CLOSED = 0.8
"""The share of the gap that the hybrid should close."""


def write_report(
    folder: Path,
    plan: Plan,
    teacher: Metrics,
    rates: Mapping[tuple[str, str], float],
    results: Results,
) -> str:
    """Writes the table, all metrics and the picture. Returns the table as Markdown.

    Args:
        folder: The folder that gets them.
        plan: The plan of the runs.
        teacher: The teacher's metrics.
        rates: The best rate of each kind and way.
        results: What the runs that are finished came to.
    """
    chosen: Chosen = {}
    for run, metrics in results.items():
        family = TWIN if run.way.startswith(TWIN) else DISTILLED
        if rates.get((run.kind, family)) == run.rate and metrics["value"] is not None:
            chosen.setdefault((run.kind, run.way), []).append(metrics)
    parts = [_finished(plan, results), _teacher(teacher)]
    if plan.has_twins:
        parts += [_students(plan, teacher, chosen), *_findings(plan, teacher, chosen)]
        parts += [_left_out(plan, chosen), *_samples(chosen)]
    else:
        parts.append(_memories(plan, teacher, chosen))
    text = "\n\n".join(parts)
    with new_file(folder / "table.md") as new:
        new.write_text(text + "\n")
    runs = [{**vars(run), **values} for run, values in results.items()]
    write_json(folder / "table.json", {"teacher": teacher, "runs": runs})
    _draw(folder / "table.png", plan, teacher, chosen)
    return text


def _finished(plan: Plan, results: Results) -> str:
    return f"{len(results)} of {number_of_runs(plan)} runs are finished."


def _teacher(teacher: Metrics) -> str:
    return (
        f"The teacher has {teacher['value']:.3f} bits per byte and recalls "
        f"{teacher['recall']:.1%} of the answers."
    )


def _students(plan: Plan, teacher: Metrics, chosen: Chosen) -> str:
    header = ["student", *(f"bits per byte, {way}" for way in WAYS), "of the gap closed"]
    header += ["recall before, %", "recall, %, distilled", "recall, %, twin"]
    header += ["seconds, distilled", "seconds, twin"]
    rows = []
    for kind in plan.kinds:
        runs = [chosen.get((kind, way), []) for way in WAYS]
        cells = [kind, *map(_cell, runs), _closed(teacher, *runs[:2])]
        cells.append(_cell(runs[0], "recall_before", 100, 1))
        cells += [_cell(each, "recall", 100, 1) for each in runs[:2]]
        rows.append([*cells, *(_cell(each, "seconds", 1, 0) for each in runs[:2])])
    return markdown(header, rows)


def _memories(plan: Plan, teacher: Metrics, chosen: Chosen) -> str:
    """The recall of students, and the share of what the teacher recalls beyond chance."""
    header = ["student", "way", "bits per byte", "recall, %", "kept, %", "seconds"]
    rows = []
    for kind in plan.kinds:
        for way in (DISTILLED, *left_out(plan, kind)):
            runs = chosen.get((kind, way), [])
            shares = [(each["recall"] - CHANCE) / (teacher["recall"] - CHANCE) for each in runs]
            share = mean_and_spread([100 * each for each in shares], 0) if shares else "-"
            cells = [_cell(runs), _cell(runs, "recall", 100, 1), share]
            rows.append([kind, way, *cells, _cell(runs, "seconds", 1, 0)])
    return markdown(header, rows)


def _findings(plan: Plan, teacher: Metrics, chosen: Chosen) -> list[str]:
    """The claims, and whether the results bear them out: of the teacher, each student, the hybrid."""
    leads: dict[str, list[str]] = {}
    gains: dict[str, list[str]] = {}
    for kind in plan.kinds:
        students = chosen.get((kind, DISTILLED), [])
        for way in (TWIN, LONGER_TWIN):
            twins = chosen.get((kind, way), [])
            if twins:
                lead = _mean(twins) - teacher["value"]
                verdict = "so" if lead >= LEAST_LEAD else "not so"
                leads.setdefault(verdict, []).append(f"{kind} ({way}: {lead:.3f})")
            if twins and students:
                gain = _mean(twins) - _mean(students)
                shown = f"{kind} ({way}: {gain:.3f})"
                gains.setdefault(_verdict(gain, students, twins), []).append(shown)
    lines = [
        f"The teacher must be at least {LEAST_LEAD} bits per byte below each twin: {_listed(leads)}.",
        f"Each student should be below both twins by more than the spread: {_listed(gains)}.",
    ]
    students, twins = (chosen.get((HYBRID, way), []) for way in (DISTILLED, TWIN))
    if students and twins:
        closed = _share_closed(teacher, students, twins)
        verdict = "does" if closed >= LEAST_CLOSED else "does not"
        aim = f"of which it should close {LEAST_CLOSED:.0%}, and {verdict}"
        lines.append(f"The hybrid closes {closed:.0%} of the gap between twin and teacher, {aim}.")
    return lines


def _verdict(gain: float, students: list[Metrics], twins: list[Metrics]) -> str:
    """Returns whether a gain is larger than the deviations of both over seeds together."""
    if min(len(students), len(twins)) < 2:
        return "not known of one seed" if gain > 0 else "not so"
    spread = sum(statistics.stdev(each["value"] for each in runs) for runs in (students, twins))
    return "so" if gain > spread else "not so"


def _listed(verdicts: Mapping[str, list[str]]) -> str:
    parts = (f"{verdict} for {', '.join(names)}" for verdict, names in sorted(verdicts.items()))
    return "; ".join(parts) or "not known yet"


def _mean(runs: list[Metrics]) -> float:
    return statistics.mean(each["value"] for each in runs)


def _cell(runs: list[Metrics], name: str = "value", scale: float = 1.0, digits: int = 3) -> str:
    return mean_and_spread([scale * each[name] for each in runs], digits) if runs else "-"


def _closed(teacher: Metrics, students: list[Metrics], twins: list[Metrics]) -> str:
    """How much of the way from the twin to the teacher the student has made."""
    if not students or not twins:
        return "-"
    return f"{_share_closed(teacher, students, twins):.0%}"


def _share_closed(teacher: Metrics, students: list[Metrics], twins: list[Metrics]) -> float:
    return (_mean(twins) - _mean(students)) / (_mean(twins) - float(teacher["value"]))


def _left_out(plan: Plan, chosen: Chosen) -> str:
    rows = []
    for kind in plan.kinds:
        for way in (DISTILLED, *left_out(plan, kind)):
            runs = chosen.get((kind, way), [])
            rows.append([kind, way, _cell(runs), _cell(runs, "recall", 100, 1)])
    return markdown(["student", "way", "bits per byte", "recall, %"], rows)


def _samples(chosen: Chosen) -> list[str]:
    """Unedited texts of a distilled student and its twin, with fixed seeds."""
    shown = []
    for way in (DISTILLED, TWIN):
        for metrics in chosen.get((MAIN, way), [])[:1]:
            texts = (" ".join(text.split()) for text in metrics.get("samples", []))
            shown += [f"{MAIN}, {way}:", *(f"> {text}" for text in texts)]
    return shown if any(line.startswith(">") for line in shown) else []


def _draw(file: Path, plan: Plan, teacher: Metrics, chosen: Chosen) -> None:
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
        for index, kind in enumerate(plan.kinds):
            values = [each["value"] for each in chosen.get((kind, way), [])]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                points.append((statistics.mean(values), index + shift, spread))
        if points:
            x, y, spreads = zip(*points, strict=True)
            style: dict[str, Any] = {"color": colour, "markersize": 5, "capsize": 2, "label": way}
            axes.errorbar(x, y, xerr=spreads, fmt=marker, **style)
    axes.axvline(teacher["value"], color="black", linestyle="--", label="teacher")
    axes.set_yticks(range(len(plan.kinds)), plan.kinds)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte of held-out stories")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(WAYS) + 1)
    figure.suptitle("Students of one teacher (mean and deviation over seeds)")
    save_picture(figure, file)
