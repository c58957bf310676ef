"""Each example runs with `--quick`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(script), "--quick"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()
    assert not list(tmp_path.iterdir())


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
