"""Each example runs with `--quick`."""

import os
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# their parts have tests of their own, or image_table.py has the same ones
LONG = ("calibration.py", "distil.py", "grpo.py", "ternary_recipe.py", "without_attention.py")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(each, marks=pytest.mark.slow if each.name in LONG else (), id=each.name)
        for each in EXAMPLES
    ],
)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    assert quick_run(script, tmp_path).strip()
    assert not list(tmp_path.iterdir())


def test_the_picture_of_a_chat_shows_what_a_chat_says(tmp_path: Path) -> None:
    pictures = ROOT / "examples" / "pictures"
    lines = quick_run(pictures / "chat.py", tmp_path).splitlines()
    picture = unescape((pictures / "chat.svg").read_text())
    # what follows are texts, which are shorter here, and speeds
    typed = [line for line in lines if line.startswith(">> ")]
    printed = [*lines[: lines.index(typed[0])], *typed]
    assert len(printed) == 8
    assert [line for line in printed if f">{line}</text>" not in picture] == []


def quick_run(script: Path, folder: Path) -> str:
    finished = subprocess.run(
        [sys.executable, str(script), "--quick"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_findings_about_students_follow_from_the_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr("comparisons.student_report._draw", lambda *_: None)
    from comparisons.student_report import write_report
    from comparisons.student_runs import DISTILLED, HYBRID, LONGER_TWIN, MAIN, TWIN, Plan, Run

    # the values of two seeds
    values = {
        (MAIN, DISTILLED): (1.3, 1.32),
        (MAIN, TWIN): (1.5, 1.6),
        (MAIN, LONGER_TWIN): (1.34, 1.36),
        (HYBRID, DISTILLED): (1.23, 1.23),
        (HYBRID, TWIN): (1.4, 1.4),
        ("GLA", DISTILLED): (1.41, 1.45),
        ("GLA", TWIN): (1.45, 1.45),
        ("HGRN2", DISTILLED): (1.3,),
        ("HGRN2", TWIN): (1.27,),
        ("MLGRU, ternary", DISTILLED): (1.25,),
        ("MLGRU, ternary", TWIN): (1.28,),
    }
    shared = {"recall": 0.5, "recall_before": 0.0, "seconds": 9.0, "samples": ["A dog.\nIt ran."]}
    results = {
        Run(*pair, 1e-3, seed): {**shared, "value": value}
        for pair, each in values.items()
        for seed, value in enumerate(each)
    }
    rates = {pair: 1e-3 for pair in values if pair[1] != LONGER_TWIN}
    text = write_report(tmp_path, Plan(), {"value": 1.2, "recall": 0.4}, rates, results)
    assert (tmp_path / "table.md").read_text() == f"{text}\n"
    for line in (
        "18 of 80 runs are finished.",
        "The teacher must be at least 0.1 bits per byte below each twin: not so for "
        "MLGRU, ternary (twin: 0.080), HGRN2 (twin: 0.070); so for MLGRU (twin: 0.350), "
        "MLGRU (twin, same time: 0.150), GLA (twin: 0.250), "
        f"{HYBRID} (twin: 0.200).",
        "Each student should be below both twins by more than the spread: not known of one seed for "
        "MLGRU, ternary (twin: 0.030); not so for GLA (twin: 0.020), HGRN2 (twin: -0.030); so for "
        f"MLGRU (twin: 0.240), MLGRU (twin, same time: 0.040), {HYBRID} (twin: 0.170).",
        "The hybrid closes 85% of the gap between twin and teacher, of which it should close 80%, and "
        "does.",
        "MLGRU, distilled:\n\n> A dog. It ran.",
    ):
        assert line in text, text
