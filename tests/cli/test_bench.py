"""`mmfree bench`: what it prints, and which flags it refuses."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.evaluation import benchmark
from mlx_mmfree.evaluation.benchmark import ON_GPU, BenchmarkSettings, Report
from mlx_mmfree.evaluation.benchmark_process import read_result, run_task
from mlx_mmfree.evaluation.benchmark_weights import presets

CONFIG = {
    "model_type": "hgrn_bit",
    "vocab_size": 70,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting processes takes most of the time of a small run."""
    monkeypatch.setattr(
        benchmark,
        "measure",
        lambda task, arguments, threads: read_result(json.dumps(run_task(task, arguments))),
    )


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", "--quick", "--json", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result: dict[str, Any] = json.loads(shown.out)
    return result


def test_json(capsys: pytest.CaptureFixture[str], config: Path, folder: Path) -> None:
    flags = ["--config", str(config), "--model", str(folder), "--no-training", "--threads", "1"]
    shown = report(capsys, *flags)
    assert set(shown) == {"machine", "figures", "memory", "ratios", "is_complete"}
    assert shown["is_complete"]
    assert set(shown["machine"]["limits"]) == {"1"}
    names = [figure["name"] for figure in shown["figures"]]
    assert "ternary 256 x 512, 1 row" in names
    assert [name for name in names if name.endswith(": decode after 2")] == [
        f"{config}: decode after 2",
        f"{folder}: decode after 2",
    ]
    assert all(figure["fraction_of_limit"] > 0 for figure in shown["figures"])


def test_flags_win_over_quick(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    flags = ["--positions", "3", "1", "--prompt-tokens", "5", "--rounds", "2", "--processes", "2"]
    shown = report(capsys, "--config", str(config), *flags, "--no-products", "--no-training")
    names = [figure["name"].split(": ")[-1] for figure in shown["figures"]]
    assert names == ["prefill of 5", "decode after 1", "decode after 3"]
    for figure in shown["figures"]:
        assert [len(process["seconds"]) for process in figure["processes"]] == [2, 2]


def test_shapes_and_their_memory(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shapes", "40x33", "8x325", "--rows", "2", "--walk-mb", "1", "--threads", "1"]
    shown = report(capsys, *flags, "--no-training")
    names = {figure["name"] for figure in shown["figures"]}
    assert {"ternary 40 x 33, 2 rows", "ternary 8 x 325, 2 rows"} <= names
    assert not any(name.startswith("head") for name in names)


def test_table(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert main(["bench", "--quick", "--config", str(config), "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    for text in ("of limit", "plain read", "256 x 512", "training step", "decode after 2", "MB of"):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--config", "no-such-preset"], "--config must be one of bitnet-2b-4t, falcon3-1b"),
        (["--revision", "main"], "--revision must come with --model"),
        (["--rounds", "0"], "must be a whole number from 1"),
        (["--shapes", "64"], "argument --shapes: "),
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--head-bits", "5"], "invalid choice: 5"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["bench", "--quick", "--no-products", "--no-training", "--json", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert reason in shown.err and shown.err.count("\n") == 1


def test_threads_are_those_of_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_mmfree.ops.backend.dispatch.on_cpu", lambda: False)
    assert main(["bench", "--quick", "--threads", "2"]) == 2
    assert "[bench] --threads must be left out where a GPU computes" in capsys.readouterr().err


def test_flags_win_over_what_is_usual_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(settings: BenchmarkSettings, threads: list[int], **_: object) -> Iterator[Report]:
        asked.append((settings, threads))
        yield Report()

    monkeypatch.setattr("mlx_mmfree.ops.backend.dispatch.on_cpu", lambda: False)
    monkeypatch.setattr(benchmark, "benchmark", measured)
    assert main(["bench"]) == 0
    assert main(["bench", "--processes", "5"]) == 0
    assert asked == [(ON_GPU, [0]), (replace(ON_GPU, processes=5), [0])]


def test_ctrl_c_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Report]:
        yield Report(machine={"device": "a processor"})
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_mmfree.evaluation.benchmark.benchmark", interrupted)
    assert main(["bench", "--quick", "--json"]) == 130
    shown = json.loads(capsys.readouterr().out)
    assert shown["machine"] == {"device": "a processor"} and shown["is_complete"] is False


def test_a_failed_process_is_one_line_and_what_was_measured_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(task: str, arguments: dict[str, Any], threads: int) -> Any:
        found = (
            run_task(task, arguments) if task == "products" else {"failure": "[bench] no memory."}
        )
        return read_result(json.dumps(found))

    monkeypatch.setattr(benchmark, "measure", measure)
    assert main(["bench", "--quick", "--json", "--threads", "1"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: [bench] no memory.\n"
    found = json.loads(shown.out)
    assert found["is_complete"] is False
    assert "ternary 256 x 512, 1 row" in [figure["name"] for figure in found["figures"]]


def test_help_names_the_configurations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"random weights: {', '.join(sorted(presets()))}, or a config.json" in shown


def test_a_picture_that_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mlx_mmfree.cli.bench.find_spec", lambda name: object())
    monkeypatch.setattr("mlx_mmfree.evaluation.benchmark.benchmark", None)
    for place, reason in ((tmp_path / "absent" / "x.png", "no folder"), (tmp_path, "is a folder")):
        assert main(["bench", "--plot", str(place)]) == 2
        shown = capsys.readouterr().err
        assert "[bench] --plot must be a file that can be written" in shown and reason in shown


@pytest.mark.parametrize(
    ("flags", "package"),
    [(("--plot", "x.png"), "matplotlib"), (("--compare", "llama.cpp"), "gguf")],
)
def test_a_missing_package_is_named_with_its_flag(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, str],
    package: str,
) -> None:
    monkeypatch.setattr("mlx_mmfree.cli.bench.find_spec", lambda name: name != package or None)
    assert main(["bench", *flags]) == 2
    assert f"[bench] {flags[0]} needs the package {package}" in capsys.readouterr().err


def test_what_python_costs(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    shown = report(capsys, "--host", "--config", str(config))
    [graph] = shown["graphs"]
    assert graph["layers"] == 2 and graph["seconds"] > 0
    assert graph["compiled_seconds"] is None or graph["compiled_seconds"] > 0
    texts = graph["kernel_texts"]
    assert texts["decode"] <= texts["chat"] <= texts["every_length"]
    assert shown["starts"]["mmfree --help"] > 0
    assert main(["bench", "--quick", "--host", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " us a layer" in lines[0] and " for a chat (" in lines[1]
    assert lines[-1].endswith("ms  import mlx.nn")
    assert main(["bench", "--host", "--model", "x"]) == 2
    assert "--host must come with --config alone" in capsys.readouterr().err
