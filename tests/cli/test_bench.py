"""`mmfree bench`: what it prints and writes, and which flags it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import bench, main
from mlx_mmfree.errors import MeasurementError
from mlx_mmfree.evaluation import benchmark
from mlx_mmfree.evaluation.benchmark import result_or_failure
from mlx_mmfree.models import architectures
from tests.evaluation.audit_models import needs_graphs

Captured = pytest.CaptureFixture[str]
PROGRAMS = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], int]]:
    """Measures in this process, since starting others takes most of the time; lists what was asked."""
    found: list[tuple[dict[str, Any], int]] = []

    def measure(function: str, arguments: dict[str, Any], threads: int) -> Any:
        found.append((arguments, threads))
        # a quick run, whatever is asked
        small = {"prompt_tokens": [4], "positions": [2], "decoded_tokens": 1, "rounds": 1}
        given = arguments if arguments["rounds"] == 1 else arguments | small
        return json.loads(json.dumps(result_or_failure(function, given)))["result"]

    monkeypatch.setattr(benchmark, "measure", measure)
    return found


def report(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert main(["bench", "--quick", "--json", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result: dict[str, Any] = json.loads(shown.out)
    return result


def test_two_lines_of_the_packaged_model(
    capsys: Captured, asked: list[tuple[dict[str, Any], int]]
) -> None:
    assert main(["bench"]) == 0
    prompt, decoding = capsys.readouterr().out.splitlines()
    assert prompt.startswith("bundled model, ") and "prefill of 4: " in prompt
    assert decoding.startswith("bundled model, ") and "decode after 2: " in decoding
    for line in (prompt, decoding):
        assert " tokens/s, " in line and "% of the " in line and line.endswith(" would allow")
    given, threads = asked[0]
    assert (given["source"], threads, len(asked)) == (str(demo.path()), 0, 3)
    assert (given["prompt_tokens"], given["positions"]) == ([512], [512])


def test_json(capsys: Captured, folder: Path) -> None:
    flags = ["--threads", "1"]
    shown = report(capsys, "--model", str(folder), *flags)
    assert set(shown) == {"machine", "metrics", "memory", "is_complete"}
    assert shown["is_complete"]
    names = [figure["name"] for figure in shown["metrics"]]
    assert names == [f"{folder}: prefill of 8", f"{folder}: decode after 8"]
    for figure in shown["metrics"]:
        assert figure["fraction_of_limit"] > 0 and figure["rate"] > 0
    [memory] = shown["memory"]
    assert memory["tensor_bytes"] > 0


def test_flags_win_over_quick(capsys: Captured) -> None:
    flags = ["--positions", "3", "1", "--prompt-tokens", "5", "--rounds", "1", "--processes", "2"]
    shown = report(capsys, *flags, "--threads", "1", "2")
    names = [figure["name"].split(": ")[-1] for figure in shown["metrics"]]
    assert names == ["prefill of 5", "decode after 1", "decode after 3"]
    # twice with each number of threads, which is this process's here
    assert [len(figure["processes"]) for figure in shown["metrics"]] == [4] * 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--revision", "main"], "--revision must come with --model"),
        (["--rounds", "0"], "must be a whole number from 1"),
        (["--model", "no/such/folder"], "no/such"),
        (["--config", "no-shape"], "--config must be one of "),
        (["--config", "bitnet"], "but got 'bitnet'. Did you mean 'bitnet-2b-4t'?"),
        (["--bound", "M2"], "--quick must come without --bound"),
    ],
)
def test_mistakes_are_one_line(capsys: Captured, arguments: list[str], reason: str) -> None:
    assert main(["bench", "--quick", "--json", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert reason in shown.err and shown.err.count("\n") == 1


def test_a_shape_is_scaled_from_its_parts(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **architectures()["llama"].tiny}))
    shown = report(capsys, "--config", str(file))
    names = [figure["name"].removeprefix(str(file)) for figure in shown["metrics"]]
    parts = [", 2 of 2 GQA layers", ", the head", ", scaled from 2 of 2 GQA layers and the head"]
    what = ("prefill of 8", "decode after 8")
    assert names == [f"{part}: {each}" for each in what for part in parts]


@needs_graphs
def test_bound(capsys: Captured, folder: Path, asked: list[tuple[dict[str, Any], int]]) -> None:
    assert main(["bench", "--bound", "M2 Max 30", "--model", str(folder)]) == 0
    decoding, prompt = capsys.readouterr().out.splitlines()
    assert decoding.startswith(f"{folder}, M2 Max with 30 GPU cores, decode after 512: at most ")
    assert decoding.endswith("bound by launches")
    assert " prefill of 512: at most " in prompt
    flags = ["--bound", "M5", "--config", "bitnet-2b-4t", "--positions", "1", "--json"]
    assert main(["bench", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["chip"]["bandwidth"] == 153e9
    found = shown["bounds"]["decode after 1"]
    assert found["binds"] == "bandwidth" and set(found["seconds"]) == {"bandwidth", "launches"}
    assert not asked
    assert main(["bench", "--bound", "M5", "--config", "x", "--model", str(folder)]) == 2
    assert "--config must come without --model" in capsys.readouterr().err


@pytest.mark.parametrize("word", bench._PROGRAMS)
def test_what_other_programs_measure_is_reported(capsys: Captured, word: str) -> None:
    assert main(["bench", word, "x"]) == 2
    shown = capsys.readouterr().err
    program = bench._PROGRAMS[word]
    assert f"{word} is measured by a program of its own" in shown
    assert f"python examples/benchmarks/{program} --help" in shown
    assert (PROGRAMS / program).is_file()


def test_threads_are_those_of_a_cpu(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "on_cpu", lambda: False)
    assert main(["bench", "--quick", "--threads", "2"]) == 2
    assert "[bench] --threads must be left out where a GPU computes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stop", "status", "message"),
    [(KeyboardInterrupt(), 130, "\n"), (MeasurementError("[bench] no memory."), 2, "no memory.\n")],
)
def test_what_was_measured_is_kept(
    stop: BaseException,
    status: int,
    message: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure = benchmark.measure

    def measured(function: str, arguments: dict[str, Any], threads: int) -> Any:
        if threads == 2:
            raise stop
        return measure(function, arguments, threads)

    monkeypatch.setattr(benchmark, "measure", measured)
    assert main(["bench", "--quick", "--json", "--threads", "1", "2"]) == status
    shown = capsys.readouterr()
    assert shown.err.endswith(message)
    found = json.loads(shown.out)
    assert found["is_complete"] is False and len(found["metrics"]) == 2


def test_a_picture_that_cannot_be_written_is_refused_first(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mlx_mmfree.cli.parts.picture_flag.find_spec", lambda name: name)
    monkeypatch.setattr(benchmark, "measure", None)
    for path, reason in ((tmp_path / "absent" / "x.png", "no folder"), (tmp_path, "is a folder")):
        assert main(["bench", "--picture", str(path)]) == 2
        shown = capsys.readouterr().err
        assert "[bench] --picture must be a file that can be written" in shown and reason in shown


def test_matplotlib_must_be_installed(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_mmfree.cli.parts.picture_flag.find_spec", lambda name: None)
    assert main(["bench", "--picture", "x.png"]) == 2
    assert "[bench] --picture needs the package matplotlib" in capsys.readouterr().err


@pytest.mark.plot
def test_picture(tmp_path: Path) -> None:
    assert main(["bench", "--quick", "--picture", str(tmp_path / "speed.png")]) == 0
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "speed.png"]
