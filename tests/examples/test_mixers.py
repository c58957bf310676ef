"""The benchmark of mixers: what it measures and prints, how it goes on, and which flags it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mixers
import pytest
from mixer_cell import DECODING, FORWARD, measure_cell, measure_rates
from mixer_report import Cell, CellResult, MixerSettings, new_report, plot_mixers, slope
from mixers import main, planned_cells

from mlx_mmfree.errors import MeasurementError
from mlx_mmfree.evaluation.benchmark import check_ending, measure
from mlx_mmfree.models.parts.mixers import spatial_mixers

Notes = dict[str, Any]
QUICK = ["--quick", "--lengths", "16", "32", "48"]


def bench(*arguments: str) -> int:
    return main(list(arguments))


@pytest.fixture
def measured(here: Any, monkeypatch: pytest.MonkeyPatch) -> list[Notes]:
    """Measures in this process; lists what was asked."""
    asked = []

    def measure(function: str, arguments: Notes, *limits: float) -> Any:
        asked.append(arguments)
        return here(function, arguments)

    monkeypatch.setattr(mixers, "measure", measure)
    return asked


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], Any]:
    """Measures nothing: a cell takes its length in seconds, or ends as this says for it."""
    endings: dict[tuple[str, int], Any] = {}

    def measure(function: str, arguments: Notes, threads: int, seconds: float | None = None) -> Any:
        length = arguments["length"]
        ending = endings.get((arguments["mixer"], length))
        if isinstance(ending, BaseException):
            raise ending
        time = {"seconds": float(length), "processor_seconds": float(length)}
        found = time | {"peak_bytes": 1000 * length, "state_bytes": 40}
        return found if ending is None else ending

    monkeypatch.setattr(mixers, "measure", measure)
    return endings


def test_json(measured: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("hgrn2", "mlgru", "fnet", *QUICK, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["is_complete"]
    cells = {tuple(each["cell"].values()): each for each in shown["cells"]}
    for mixer in ("hgrn2", "mlgru", "fnet"):
        for work in ("forward", "forward and backward"):
            for length in (16, 32, 48):
                assert cells[mixer, work, length]["seconds"] > 0
    # one that is not causal cannot decode
    assert {name for name, work, _ in cells if work == "decoding"} == {"hgrn2", "mlgru"}
    states = [cells["hgrn2", "decoding", position]["state_bytes"] for position in (4, 16)]
    assert states[0] == states[1] > 0
    assert shown["rates"].keys() == {"hgrn2", "mlgru"}
    [of_matrices], [of_vectors] = shown["rates"]["hgrn2"], shown["rates"]["mlgru"]
    assert of_matrices["name"] == "hgrn2: gated_linear_attention"
    assert of_vectors["name"] == "mlgru: mlgru_step"
    # reading three numbers and writing one for each of 32 dims
    assert of_vectors["bytes"] == 128 * 32 * 4 * 4


def test_work_of_a_matrix_is_counted_without_what_is_masked() -> None:
    [record] = rates("retnet", length=64, dims=32)
    heads, keys, values, length = 8, 4, 8, 64
    pairs = length * (length + 1) // 2
    assert record["macs"] == heads * (2 * length * keys * values + pairs * (keys + values))


@pytest.mark.parametrize(("mixer", "moved"), [("hgrn", 3), ("hydra", 2)])
def test_gates_that_all_positions_share_are_not_counted(mixer: str, moved: int) -> None:
    [record] = rates(mixer, length=16, dims=8)
    assert record["bytes"] == moved * 16 * 8 * 4


def rates(mixer: str, **sizes: int) -> list[Notes]:
    return measure_rates(mixer, batch_size=1, rounds=1, **sizes)


def test_tables(planned: dict, capsys: pytest.CaptureFixture[str]) -> None:
    planned["gqa", 16] = subprocess.TimeoutExpired("gqa", 1)
    planned["gru", 48] = {"stopped": "memory"}
    planned["hydra", 32] = MeasurementError("[bench] it broke.")
    names, flags = (
        ["gqa", "gru", "hydra"],
        ["--rate-length", "0", "--time-limit", "7", "--threads", "1"],
    )
    assert (
        bench(*names, *QUICK, *flags, "--work", "forward", "decoding", "--memory-limit", "2") == 0
    )
    lines = capsys.readouterr().out.splitlines()
    index = next(n for n, line in enumerate(lines) if line.startswith("forward: time"))
    rows = [" ".join(line.split()) for line in lines[index + 1 : index + 5]]
    # after a limit, nothing longer is tried
    assert rows == [
        "mixer 16 32 48 slope",
        "gqa > 7 s > 7 s > 7 s",
        "gru 16.00 s 32.00 s > 2.00 GB",
        "hydra 16.00 s failed 48.00 s",
    ]
    index = next(n for n, line in enumerate(lines) if line.startswith("decoding: processor time"))
    assert " ".join(lines[index + 3].split()) == "gru 4.00 s 16.00 s 4.00 0.0 kB 0.0 kB"
    assert lines[-1] == "hydra, forward, 32: [bench] it broke."


def test_markdown(planned: dict, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--work", "forward", "--rate-length", "0", "--markdown"]
    assert bench("gla", *QUICK, *flags) == 0
    shown = capsys.readouterr().out
    assert "| mixer | 16 | 32 | 48 | slope |\n| --- | ---: | ---: | ---: | ---: |" in shown
    assert "| `gla` | 16.00 s | 32.00 s | 48.00 s | 1.00 |" in shown


def test_it_goes_on_where_it_stopped(
    planned: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    flags = ["--work", "forward", "--rate-length", "0", "--json", "--results", str(file)]
    planned["gla", 48] = KeyboardInterrupt()
    assert bench("gla", *QUICK, *flags) == 130
    shown = json.loads(capsys.readouterr().out)
    assert not shown["is_complete"]
    assert [each["cell"]["length"] for each in shown["cells"]] == [16, 32]
    # what is kept is not measured again
    planned |= {("gla", 16): KeyboardInterrupt(), ("gla", 32): KeyboardInterrupt()}
    del planned["gla", 48]
    assert bench("gla", *QUICK, *flags) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["seconds"] for each in shown["cells"]] == [16.0, 32.0, 48.0]
    assert bench("gla", *QUICK, *flags, "--dims", "64") == 2
    assert "must hold a run with dims 64 but got 32" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", '{"settings": 3}', "no"])
def test_other_files_are_not_taken_for_results(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    assert bench("gla", *QUICK, "--results", str(file)) == 2
    assert "--results must be a file that this command wrote" in capsys.readouterr().err
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["no_such", *QUICK], "a token mixer must be one of those that follow but got 'no_such'"),
        (["--work", "sleeping"], "choose from"),
        (["--lengths", "0"], "--lengths"),
        pytest.param(
            ["--picture", "no/such/folder/file.png"],
            "--picture must be a file that can be written",
            marks=pytest.mark.plot,
        ),
        (["--json", "--markdown"], "not allowed with"),
    ],
)
def test_what_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*flags, "--quick") == 2
    assert words in capsys.readouterr().err


def test_matplotlib_must_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mixers, "find_spec", lambda name: None)
    assert bench(*QUICK, "--picture", "file.png") == 2
    assert "needs the package matplotlib" in capsys.readouterr().err


def test_slopes_are_those_of_the_greatest_lengths() -> None:
    lengths = [2**n for n in range(4, 10)]
    squares = {n: 3e-6 * n**2 + (1.0 if n < 32 else 0.0) for n in lengths}
    assert slope(squares) == pytest.approx(2.0)
    assert slope({n: 0.5 for n in lengths}) == pytest.approx(0.0)
    assert slope({16: 1.0, 32: 2.0, 64: None}) is None


def test_a_length_bound_mixer_is_made_for_what_it_reads() -> None:
    given = {"dims": 16, "batch_size": 1, "rounds": 1, "memory_bytes": 10**9}
    notes = measure_cell("gmlp", FORWARD, 24, **given)
    assert notes["seconds"] > 0
    notes = measure_cell("cosformer", DECODING, 24, **given)
    assert notes["state_bytes"] > 0


def test_the_cells_of_mixers() -> None:
    settings = MixerSettings(lengths=(8,), positions=(2, 4), works=("forward", "decoding"))
    assert planned_cells(["gla", "sima"], settings) == [
        *(Cell("gla", FORWARD, 8), Cell("gla", DECODING, 2), Cell("gla", DECODING, 4)),
        Cell("sima", FORWARD, 8),
    ]


def test_limits_end_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {"mixer": "hydra", "work": FORWARD, "length": 400_000, "dims": 256, "batch_size": 1}
    given |= {"rounds": 1, "memory_bytes": 10**7}
    assert measure("mixer_cell:measure_cell", given, 1) == {"stopped": "memory"}
    program = tmp_path / "waits"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(subprocess.TimeoutExpired):
        measure("mixer_cell:measure_cell", given, 1, 0.1)


def test_a_process_that_memory_ends_says_so() -> None:
    with pytest.raises(
        MeasurementError, match="SIGSEGV, as MLX's processes on a CPU do when memory"
    ):
        check_ending("it", -11, "")


@pytest.mark.plot
def test_picture(tmp_path: Path) -> None:
    settings = MixerSettings(threads=os.cpu_count() or 1)
    report = new_report(settings)
    for cell in planned_cells(["gla", "gqa", "fnet"], settings):
        time = 1e-5 * cell.length
        report.cells[cell] = CellResult(cell, time, time, 1000 * cell.length, 40)
    stopped = Cell("gqa", FORWARD, 32768)
    report.cells[stopped] = CellResult(stopped, stopped="time")
    plot_mixers(report, tmp_path / "mixers.png")
    assert (tmp_path / "mixers.png").read_bytes().startswith(b"\x89PNG")


def test_spatial_mixers_are_measured_on_maps(
    measured: list[Notes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--quick", "--spatial", "4", "6", "8") == 0
    shown = capsys.readouterr().out
    assert "maps: 1" in shown and "6 x 6" in shown and "decoding" not in shown
    names = list(spatial_mixers())
    assert all(name in shown for name in names)
    assert {arguments["length"] for arguments in measured} == {16, 36, 64}
    assert len(measured) == 2 * 3 * len(names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lengths", "16"), "--lengths must be left out with --spatial"),
        (("--positions", "16"), "--positions must be left out with --spatial"),
        (("--work", "decoding"), "--work must be forward or backward with --spatial"),
        (("mlgru",), "a spatial mixer must be one of"),
    ],
)
def test_what_does_not_go_with_maps_is_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*flags, "--spatial") == 2
    assert message in capsys.readouterr().err
