"""The tables of results in the README files equal the results of the runs stored beside them."""

import json
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path
from statistics import mean, stdev

import mlx.core as mx
import pytest

from mlx_mmfree import native
from mlx_mmfree.cli import distil, main, ternarize
from mlx_mmfree.cli.distil import efforts_shown
from mlx_mmfree.training.distil.distil import Distillation
from mlx_mmfree.training.distil.settings import DistilSettings, TernarizeSettings, read_settings
from mlx_mmfree.training.distil.student import MACHINES
from tests.readme.documents import ROOT, sections

EXAMPLES = ROOT / "examples"
TRAINING = ROOT / "mlx_mmfree" / "training" / "README.md"


def test_table_of_the_translation_toy_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    table = runpy.run_path(str(EXAMPLES / "translation_toy.py"))["_table"]
    rows = json.loads((EXAMPLES / "translation_toy" / "table.json").read_text())
    assert table(rows) in TRAINING.read_text()


def test_table_of_mixers_and_linears_is_its_result() -> None:
    page = TRAINING.read_text()
    runs = json.loads((EXAMPLES / "mixers_and_linears" / "table.json").read_text())["runs"]
    for model in {run["model"] for run in runs}:
        own = [run for run in runs if run["model"] == model]
        first = [run for run in own if run["seed"] == 0]
        rates = sorted(run["learning_rate"] for run in first)
        best = min(first, key=lambda run: run["bits_per_byte"])["learning_rate"]
        assert rates[0] < best < rates[-1]
        values = [run["bits_per_byte"] for run in own if run["learning_rate"] == best]
        assert len(values) == 3
        tried = f"{rates[0]:g} to {rates[-1]:g} | {best:g}"
        assert f"| {model} | {tried} | {mean(values):.3f} ± {stdev(values):.3f} |" in page


def test_table_of_images_is_its_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("comparisons.image_report._draw", lambda *_: None)
    from comparisons.image_report import write_report
    from comparisons.image_runs import TERNARIZED, Plan, Row, Run, best_runs

    plan = Plan()
    runs = json.loads((EXAMPLES / "image_table" / "table.json").read_text())["runs"]
    results = {Run(Row(r["backbone"], r["linear"]), r["rate"], r["seed"]): r for r in runs}
    assert len(results) == 117
    tried = {run: r for run, r in results.items() if not run.seed and run.row.linear != TERNARIZED}
    text = write_report(tmp_path, plan, best_runs(plan, tried), results)
    page = (EXAMPLES / "README.md").read_text()
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 2 and all(table.strip() in page for table in tables)


@pytest.mark.exhaustive
def test_table_of_token_mixers_is_its_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("comparisons.learning_report._draw", lambda *_: None)
    from comparisons.learning_report import write_report
    from comparisons.learning_runs import Plan, Row, Run, best_runs

    runs = json.loads((EXAMPLES / "learning_table" / "table.json").read_text())["runs"]
    rows = {r["model"] for r in runs if r["part"] == "table"}
    plan = Plan(mixers=tuple(name for name in Plan().mixers if name in rows))
    tasks = {task.name: task for task in plan.tasks}
    results = {
        Run(
            Row(r["part"], tasks[r["task"]], r["model"], r["linear"]), r["learning_rate"], r["seed"]
        ): r
        for r in runs
    }
    tried = {run: r for run, r in results.items() if not run.seed}
    text = write_report(tmp_path, plan, best_runs(plan, tried), results)
    page = (EXAMPLES / "README.md").read_text()
    for part in text.strip().split("\n\n"):
        assert part in page, part


@pytest.mark.parametrize("name", ["table", "memory"])
def test_table_of_students_is_their_result(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("comparisons.student_report._draw", lambda *_: None)
    from comparisons.student_report import write_report
    from comparisons.student_runs import DISTILLED, MEMORY, TWIN, Plan, Run, best_rates

    stored = json.loads((EXAMPLES / "without_attention" / f"{name}.json").read_text())
    results = {Run(r["kind"], r["way"], r["rate"], r["seed"]): r for r in stored["runs"]}
    tried = {run: r for run, r in results.items() if run.way in (DISTILLED, TWIN) and not run.seed}
    plan = Plan() if name == "table" else MEMORY
    text = write_report(tmp_path, plan, stored["teacher"], best_rates(tried), results)
    page = (EXAMPLES / "README.md").read_text()
    for part in text.strip().split("\n\n"):
        assert part in page, part


@pytest.mark.slow
@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_estimates_for_real_teachers_are_those_of_the_command() -> None:
    file = EXAMPLES / "real_teachers" / "README.md"
    page = file.read_text()
    commands = [line for each in sections(file) for line in each.commands()]
    assert len(commands) == 6
    for command in commands:
        shown = efforts_shown(Distillation(_settings_of(command), only_plans=True))
        table, rates = "\n".join(shown).split("\nEstimates.")
        assert f"```\n{table}\n```" in page
    for name, machine in MACHINES.items():
        assert f"| {name} | {machine.rate / 1e12:.3g}e12 |" in page
        assert f"{name}: {machine.rate / 1e12:.3g} TFLOP/s" in rates


@pytest.mark.slow
@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_what_flags_cost_of_memory_is_what_the_command_says() -> None:
    file = EXAMPLES / "real_teachers" / "README.md"
    llama, qwen, *_ = (line for each in sections(file) for line in each.commands())
    change = r"(as above|(?:with|without) `([^|]*)`)"
    rows = re.findall(rf"^\| {change} \| (\S+) GB \|$", file.read_text(), re.M)
    assert len(rows) == 7
    for change, flag, size in rows:
        assert _third_stage(llama, change, flag) == size, change
    change, flag, _ = rows[-1]
    assert (
        f"of which the last takes the most, {_third_stage(qwen, change, flag)} GB"
        in file.read_text()
    )


def _third_stage(command: str, change: str, flag: str) -> str:
    """The memory of the third stage in GB, if a flag of a command is another or missing."""
    if change.startswith("without"):
        assert flag in command
        command, flag = command.replace(flag, ""), ""
    settings = _settings_of(f"{command} {flag} --mixers-steps 0 --hidden-steps 0")
    plan = Distillation(settings, only_plans=True).plans(mx.bfloat16)["logits"]
    return f"{plan.total / 1e9:.2f}"


def _settings_of(command: str) -> DistilSettings:
    """The settings of a command of the page, with the description of the teacher that lies there."""
    _, name, *words = shlex.split(command)
    parser, kind = _COMMANDS[name]
    given = vars(parser().parse_args(words))
    given["model"] = str(EXAMPLES / "real_teachers" / given["model"].partition("/")[2].lower())
    names = {field.name for field in fields(kind)} & given.keys()
    return read_settings(None, {name: given[name] for name in names}, kind)


_COMMANDS = {
    "distil": (distil.build_parser, DistilSettings),
    "ternarize": (ternarize.build_parser, TernarizeSettings),
}


@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_what_a_token_takes_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    columns = []
    for flags in ((), ("--config", "mmfreelm-370m"), ("--config", "bitnet-2b-4t")):
        assert main(["audit", *flags, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        moved, launches = found["bytes"], found["launches"]
        cpu = launches["cpu_kernels"] + launches["cpu_mlx"]
        columns.append(
            {
                "multiplications of floats": f"{found['float_multiplications']:,}",
                "additions of floats": f"{found['float_additions']:,}",
                "other operations on floats": f"{found['other_float_operations']:,}",
                "operations on integers": f"{found['integer_operations']:,}",
                "bytes of weights read": f"{moved['weights_read']:,}",
                "bytes of state read and written": f"{moved['state_read'] + moved['state_written']:,}",
                "bytes between operations": f"{moved['between_read'] + moved['between_written']:,}",
                "launches on a CPU, on Metal": f"{cpu}, {launches['metal']}",
            }
        )
    page = (ROOT / "mlx_mmfree" / "evaluation" / "README.md").read_text()
    for row in columns[0]:
        assert f"| {row} | {' | '.join(column[row] for column in columns)} |" in page, row
