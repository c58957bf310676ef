"""Reports of machines, and the files by which GitHub asks for them."""

import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.command import command_names
from mlx_mmfree.evaluation import benchmark
from mlx_mmfree.evaluation.benchmark import MODEL, result_or_failure

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".github/report_table.py"
FIGURE = {
    "name": "ternary 256 x 512, 1 row",
    "threads": 2,
    "limit": "plain read",
    "fraction_of_limit": 0.84,
    "gb_per_second": 98.76,
    "rate": 1234.5,
    "unit": "rows",
}
TIME = {
    "kernel": "bit_linear, groups",
    "rows": 1,
    "inputs": 2560,
    "outputs": 6912,
    "seconds": 6.54e-5,
    "bytes_per_second": 67.6e9,
    "share_of_read": 0.68,
}
RATIO = {"name": FIGURE["name"], "other": "MLX 2-bit", "median": 1.234, "best": 1.3}


def _run(*files: Path) -> None:
    runpy.run_path(str(SCRIPT))["main"]([str(file) for file in files])


def test_reports_become_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    report["device"]["name"] = "Apple M9"
    report["metal_kernels"] = {"sound": None, "bit_linear": "it computes wrong values"}
    report["kernel_times"] = [TIME, TIME | {"rows": 8, "share_of_read": None}]
    doctor, bench = tmp_path / "doctor.json", tmp_path / "bench.json"
    doctor.write_text(json.dumps(report))
    figures = [FIGURE, FIGURE | {"threads": 0}]
    bench.write_text(
        json.dumps({"machine": {"device": "Apple M9"}, "figures": figures, "ratios": [RATIO]})
    )
    _run(doctor, bench)
    machines, kernels, shown, ratios = capsys.readouterr().out.strip().split("\n\n")
    assert "| doctor.json | Apple M9 (" in machines
    assert "| bit_linear: it computes wrong values | " in machines
    for rows, share in (("1", "68%"), ("8", "")):
        row = f"| Apple M9 | bit_linear, groups | 2560 x 6912 | {rows} | 65.4 | 67.6 | {share} |"
        assert row in kernels
    for threads in ("2", "GPU"):
        row = f"| ternary 256 x 512, 1 row | {threads} | 98.8 | 84% of plain read | 1234.5 rows/s |"
        assert row in shown
    assert "| Apple M9 | ternary 256 x 512, 1 row | MLX 2-bit | 1.23 | 1.30 |" in ratios


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_other_files_are_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(SystemExit):
        _run(file)
    assert f"'{file}' must" in capsys.readouterr().err


def _steps() -> list[str]:
    """The lines that the workflows run."""
    lines = []
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            lines += [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    return lines


@pytest.mark.parametrize("line", _steps())
def test_workflows_run_what_is_there(line: str) -> None:
    words = shlex.split(line)
    if "mmfree" in words:
        assert words[words.index("mmfree") + 1] in command_names()
    files = [word for word in words if word.endswith(".py") or word.startswith(".ci/")]
    assert all((ROOT / file).is_file() for file in files)


def test_the_form_asks_for_what_the_commands_print() -> None:
    form: dict[str, Any] = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/machine.yml").read_text())
    labels = [part["attributes"].get("label") for part in form["body"]]
    assert {"mmfree doctor --json", "mmfree bench --json"} <= set(labels)


BENCHMARKS = ROOT / ".github" / "benchmarks"
MACHINES = runpy.run_path(str(BENCHMARKS / "make_table.py"))
SMALL = {"name": "packaged model", "source": str(demo.path()), "prompt_tokens": [4]}
SMALL |= {"positions": [2], "decoded_tokens": 1, "rounds": 1}


def test_measurements_of_machines_have_names_and_form_by_the_rule() -> None:
    for file in MACHINES["measurements"]():
        assert MACHINES["faults"](file) == []


def test_the_table_of_machines_is_that_of_its_files() -> None:
    page = (BENCHMARKS / "README.md").read_text()
    files = MACHINES["measurements"]()
    assert page.endswith(f"{MACHINES['MARK']}{MACHINES['table'](files)}\n")
    assert ("empty until someone sends" in (ROOT / "README.md").read_text()) == (not files)


def test_a_measurement_makes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `mmfree bench --report` writes is taken as it is."""
    found = json.loads(json.dumps(result_or_failure(MODEL, SMALL)))["result"]
    monkeypatch.setattr(benchmark, "measure", lambda *_: found)
    for name in ("README.md", "template.json"):
        (tmp_path / name).write_text((BENCHMARKS / name).read_text())
    assert main(["bench", "--processes", "1", "--report", str(tmp_path)]) == 0
    MACHINES["main"](["--write"], tmp_path)
    page = (tmp_path / "README.md").read_text()
    above, rows = page.split(MACHINES["MARK"])
    assert above and len(rows.splitlines()) == 4
    assert " | packaged model | prefill of 4 | " in rows and " | decode after 2 | " in rows


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("Mine.json", {}, "its name is not as"),
        ("a_1-gb_b.json", {"path": "/home/me"}, "the file has not the keys"),
        ("a_1-gb_b.json", {"chip": 3}, "the file's 'chip' is no str"),
        ("a_1-gb_b.json", {"figures": [{}]}, "a figure has not the keys"),
    ],
)
def test_other_measurements_are_refused(
    name: str,
    change: dict[str, Any],
    fault: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = json.loads((BENCHMARKS / "template.json").read_text())
    (tmp_path / name).write_text(json.dumps(template | change))
    with pytest.raises(SystemExit):
        MACHINES["main"]([], tmp_path)
    assert f"{name}: {fault}" in capsys.readouterr().err
