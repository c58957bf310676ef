"""Reports of machines, and the files by which GitHub asks for them."""

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.machine_report import _without_paths
from mlx_mmfree.cli.parts.registry import command_names
from mlx_mmfree.evaluation import benchmark
from mlx_mmfree.evaluation.benchmark import MODEL, result_or_failure

ROOT = Path(__file__).parents[1]
TABLES = runpy.run_path(str(ROOT / ".github/report_table.py"))
BENCHMARKS = ROOT / ".github" / "benchmarks"
SMALL = {"name": "bundled model", "source": str(demo.path()), "prompt_tokens": [4]}
SMALL |= {"positions": [2], "decoded_tokens": 1, "rounds": 1}
TIME = {
    "kernel": "bit_linear, groups",
    "rows": 1,
    "inputs": 2560,
    "outputs": 6912,
    "seconds": 6.54e-5,
    "bytes_per_second": 67.6e9,
    "share_of_read": 0.68,
}


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report of this machine, of a short measurement."""
    found = json.loads(json.dumps(result_or_failure(MODEL, SMALL)))["result"]
    monkeypatch.setattr(benchmark, "measure", lambda *_: found)
    folder = tmp_path / "sent"
    folder.mkdir()
    assert main(["doctor", "--report", str(folder)]) == 0
    (file,) = folder.glob("*.json")
    return file


@pytest.mark.exhaustive
def test_a_report_becomes_tables(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report of `mmfree doctor --report` is taken as it is."""
    content = json.loads(report.read_text())
    assert re.fullmatch(r"[a-z0-9.-]+_\d+-gb\.json", report.name)
    content["machine"]["chip"] = "Apple M9"
    sound = {"kernel": "sound", "fault": None, "error": 1e-7, "first_difference": None}
    wrong = {"kernel": "bit_linear", "fault": "it computes wrong values", "error": 0.5}
    content["kernels"] = [sound, wrong | {"first_difference": "at [0, 3]: 1 instead of 2"}]
    content["kernel_times"] = [TIME, TIME | {"rows": 8, "share_of_read": None}]
    report.write_text(json.dumps(content))
    capsys.readouterr()
    TABLES["main"]([str(report)])
    machines, rates, kernels = capsys.readouterr().out.strip().split("\n\n")
    assert "| Apple M9 | " in machines and "1 (error at most 1e-07)" in machines
    assert "bit_linear: it computes wrong values, at [0, 3]: 1 instead of 2" in machines
    assert " | bundled model | prefill of 4 | " in rates
    assert " | bundled model | decode after 2 | " in rates
    for rows, share in (("1", "68%"), ("8", "")):
        row = f"| Apple M9 | bit_linear, groups | 2560 x 6912 | {rows} | 65.4 | 67.6 | {share} |"
        assert row in kernels


def test_a_report_names_no_person_and_no_path(report: Path) -> None:
    text = report.read_text()
    assert str(Path.home()) not in text and str(ROOT) not in text
    assert _without_paths("not in /home/me/x y/z.so: it") == "not in <path>: it"
    assert _without_paths({"rate": ["GB/s", "see https://a.b/c"]}) == {
        "rate": ["GB/s", "see https://a.b/c"]
    }


def test_the_page_has_the_tables_of_its_files(tmp_path: Path, report: Path) -> None:
    page = (BENCHMARKS / "README.md").read_text()
    files = sorted(BENCHMARKS.glob("*.json"))
    assert page.endswith(f"{TABLES['MARK']}{TABLES['tables'](files)}\n")
    assert ("empty until" in (ROOT / ".github" / "STATUS.md").read_text()) == (not files)
    (report.parent / "README.md").write_text(page)
    TABLES["main"](["--write"], report.parent)
    above, tables = (report.parent / "README.md").read_text().split(TABLES["MARK"])
    assert above and " | bundled model | " in tables


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"machine": 1}'])
def test_other_files_are_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(SystemExit):
        TABLES["main"]([str(file)])
    assert f"'{file}' must be a report" in capsys.readouterr().err


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
    names = [word.removeprefix("$GITHUB_WORKSPACE/") for word in words]
    # a pattern names no file
    files = [name for name in names if name.endswith(".py") or name.startswith(".ci/")]
    files = [name for name in files if "*" not in name]
    assert all((ROOT / file).is_file() for file in files)


def test_the_format_asks_for_what_the_command_writes() -> None:
    format: dict[str, Any] = yaml.safe_load(
        (ROOT / ".github/ISSUE_TEMPLATE/machine.yml").read_text()
    )
    labels = [part["attributes"].get("label") for part in format["body"]]
    assert "mmfree doctor --report" in labels
