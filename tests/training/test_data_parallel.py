"""Training in two processes against training in one, and what happens when one of them dies."""

import hashlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.results import read_log
from mlx_mmfree.training.run_folder import read_progress
from tests.process_group import MMFREE, finish, start_group
from tests.training.parallel_run import (
    DEATH,
    MODELS,
    STEPS,
    STOPPED_TIMEOUT_S,
    gradient_of,
    train,
)

TIMEOUT_S = 300.0
PROGRAM = ("-m", "tests.training.parallel_run")


def _losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder / "log.jsonl") if "loss" in record]


def _results(folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """The results that each process wrote."""
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of runs of two processes, and what each of them found."""
    folder = tmp_path_factory.mktemp("ranks")
    finish(start_group(folder, 2, *PROGRAM, "equality", str(folder), str(folder)))
    return folder, _results(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same runs in one process, which has all rows."""
    folder = tmp_path_factory.mktemp("alone")
    for name in MODELS:
        train(folder / name, name, DataParallel())
    return folder


@pytest.mark.exhaustive
def test_losses_are_those_of_one_process_with_all_rows(
    ranks: tuple[Path, list[dict[str, Any]]], alone: Path
) -> None:
    one, two = _losses(alone / "dense"), _losses(ranks[0] / "0" / "dense")
    assert len(one) == len(two) == STEPS["dense"]
    assert one[-1] < one[0] - 0.1
    assert two == pytest.approx(one, abs=1e-5, rel=0)


@pytest.mark.exhaustive
def test_quantised_training_begins_alike(
    ranks: tuple[Path, list[dict[str, Any]]], alone: Path
) -> None:
    # later a code at a rounding boundary may fall to the other side, as between any two orders of sums
    one, two = _losses(alone / "ternary"), _losses(ranks[0] / "0" / "ternary")
    assert two[0] == pytest.approx(one[0], abs=1e-5)


def test_processes_end_with_the_same_weights(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = ranks[1]
    for name in MODELS:
        assert first[name] == second[name]


def test_only_the_first_process_writes(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = ranks
    names = {path.name for path in folder.iterdir() if not path.name.startswith("group-")}
    assert names == {
        "0",
        "result-0.json",
        "result-1.json",
        "done-0",
        "done-1",
    }
    assert (folder / "0" / "dense" / "checkpoint" / "progress.json").exists()
    environment = read_log(folder / "0" / "dense" / "log.jsonl")[0]
    assert environment["processes"] == 2


def test_sums_and_agreements(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank, result in enumerate(ranks[1]):
        raw = result["raw"]
        assert raw["sums"] == [0.75, 300_000_000, [[3, 3]] * 3, [1.5]]
        assert raw["dtypes"] == ["mlx.core.float32", "mlx.core.bfloat16"]
        assert raw["first"] == [[1, 1], {"valid_loss": 0.125, "count": 1}]
        assert raw["share"] == [rank, 2]
        steps, rows = raw["refusals"]
        assert "'step' must be the same in all processes but got 1 to 2." in steps
        assert "'batch_size' must be a multiple of the number of processes, 2, but got 3." in rows


def test_two_processes_add_exactly(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    one, other = gradient_of(0), gradient_of(1)
    digest = hashlib.sha256()
    for name in sorted(one):
        digest.update((np.array(one[name]) + np.array(other[name])).tobytes())
    for result in ranks[1]:
        assert result["exact"] == [digest.hexdigest()] * 3


@pytest.mark.exhaustive
def test_three_processes_add_alike(tmp_path: Path) -> None:
    finish(start_group(tmp_path, 3, *PROGRAM, "exact", str(tmp_path), str(tmp_path)))
    first, *others = [result["exact"] for result in _results(tmp_path, 3)]
    assert all(other == first for other in others)
    in_buckets, again, in_one = first
    assert in_buckets == again
    # where a number stands in its message decides in which order a ring adds it
    assert in_buckets != in_one


@pytest.mark.exhaustive
@pytest.mark.parametrize("dying", [0, 1])
def test_a_killed_process_ends_the_other_and_the_run_goes_on(
    tmp_path: Path, ranks: tuple[Path, list[dict[str, Any]]], dying: int
) -> None:
    run = str(tmp_path / "run")
    processes = start_group(tmp_path, 2, *PROGRAM, "kill", run, str(tmp_path), str(dying))
    survivor = 1 - dying
    errors = finish(processes)[survivor][1]
    assert f"[training] another of the 2 processes has ended, so process {survivor} stops" in errors
    assert processes[dying].returncode == -signal.SIGKILL
    assert processes[survivor].returncode == 1
    assert len(_losses(tmp_path / "run")) == DEATH
    if dying == 1:
        finish(start_group(tmp_path, 2, *PROGRAM, "resume", run, str(tmp_path)))
        assert _losses(tmp_path / "run") == _losses(ranks[0] / "0" / "dense")
        assert [result["dense"] for result in _results(tmp_path)] == [ranks[1][0]["dense"]] * 2


@pytest.mark.exhaustive
def test_a_stopped_process_is_not_waited_for_without_end(tmp_path: Path) -> None:
    arguments = ("stop", str(tmp_path / "run"), str(tmp_path), "1")
    waiting, stopped = start_group(tmp_path, 2, *PROGRAM, *arguments)
    try:
        _, error = waiting.communicate(timeout=TIMEOUT_S)
        assert stopped.poll() is None
    finally:
        waiting.kill()
        stopped.send_signal(signal.SIGCONT)
    _, other = stopped.communicate(timeout=TIMEOUT_S)
    waited = f"has waited {STOPPED_TIMEOUT_S:g} s for another of the 2 processes"
    assert f"error: [training] process 0 {waited}" in error
    assert "'process_timeout_s' sets how long a process waits" in error
    assert "another of the 2 processes has ended, so process 1 stops" in other
    assert (waiting.returncode, stopped.returncode) == (2, 1)
    progress = read_progress(tmp_path / "run")
    assert progress is not None and progress["step"] == 10


def test_the_others_wait_for_long_work_of_the_first(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert [result["order"] for result in ranks[1]] == [[], ["done-0"]]


@pytest.mark.exhaustive
def test_a_signal_to_one_process_saves_and_ends_both(
    config: Path, tmp_path: Path, run_values: dict[str, Any]
) -> None:
    config.write_text(yaml.safe_dump(run_values | {"steps": 100_000, "save_every": 100_000}))
    processes = start_group(tmp_path, 2, *MMFREE, "train", "--config", str(config))
    while len(_losses(tmp_path / "run")) < 3 and all(p.poll() is None for p in processes):
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    outputs = finish(processes)
    assert outputs[1][0] == ""
    errors = [error for _, error in outputs]
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2
    assert all("[training] SIGTERM stopped the run after step" in error for error in errors)
    progress = read_progress(tmp_path / "run")
    assert progress is not None and progress["step"] >= len(_losses(tmp_path / "run"))
