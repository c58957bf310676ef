"""One run that is killed at random moments, and started again until it ends."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mlx_mmfree.platform.process_group import start_group
from mlx_mmfree.training.results import read_log
from tests.fuzz.training_options import (
    DISTIL,
    DISTIL_OPTIONS,
    LORA,
    LORA_OPTIONS,
    TRAIN,
    TRAIN_OPTIONS,
    Values,
)
from tests.process_group import ROOT

BASES = {
    "train": (TRAIN, TRAIN_OPTIONS),
    "lora": (LORA, LORA_OPTIONS),
    "distil": (DISTIL, DISTIL_OPTIONS),
}
_OUTPUT_KEYS = {"train": "output", "lora": "adapter_path", "distil": "output"}
TURNS = [(command, option) for command, (_, options) in BASES.items() for option in options]
_TIMEOUT_S = 600
_MOST_KILLS = 3
_REFUSED, _LATE = 2, 124
# what differs between two runs of the same course: time, and what else the machine does
_OF_THE_MACHINE = (
    *("tokens_per_second", "peak_memory_bytes", "anonymous_bytes", "mapped_bytes"),
    *("process_timeout_s", "seconds"),
)

# a model card names the folder of its run
_OF_THE_FOLDER = ("README.md",)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        command: Its command.
        values: The values of its YAML file.
        processes: In how many processes it runs.
    """

    command: str
    values: Values
    processes: int

    def __str__(self) -> str:
        base = BASES[self.command][0]
        changed = {k: v for k, v in self.values.items() if base.get(k) != v}
        gone = [name for name in base if name not in self.values]
        return f"{self.command}, {self.processes} processes, {changed}, without {gone}"


class Refused(Exception):
    """The options do not go together."""


def draw_case(draw: random.Random) -> tuple[Case, Case]:
    """A case in which one option has its turn, with others beside it; and the same without these."""
    command, option = draw.choice(TURNS)
    base, options = BASES[command]
    values = base | option
    for other in draw.sample(options, draw.choice([0, 0, 1, 2])):
        if not other.keys() & option.keys():
            values |= other
    # the stages of a distillation run in one process
    processes = 1 if command == "distil" else draw.choice([1, 1, 1, 2])
    alone = Case(command, _given(base | option), processes)
    return Case(command, _given(values), processes), alone


def _given(values: Values) -> Values:
    return {name: value for name, value in values.items() if value is not None}


def kill_and_compare(case: Case, folder: Path, draw: random.Random) -> None:
    """Runs the case whole, and once more with at least one kill.

    Raises:
        Refused: The options do not go together.
        AssertionError: A run did not end as it should, or the two differ.
    """
    began = time.monotonic()
    status, output = _run(case, folder, "whole", None)
    if status == _REFUSED:
        raise Refused(output)
    assert not status, f"the whole run ended with status {status}: {output[-2000:]}"
    duration = time.monotonic() - began
    kills = 0
    while not kills:
        shutil.rmtree(folder / "killed", ignore_errors=True)
        for _ in range(draw.randint(1, _MOST_KILLS)):
            status, _ = _run(case, folder, "killed", draw.uniform(0.0, duration))
            kills += status == -signal.SIGKILL
        # it had ended before each of the moments
        duration /= 2
    status, output = _run(case, folder, "killed", None)
    assert not status, f"the last start ended with status {status}: {output[-2000:]}"
    if found := differences(folder / "whole", folder / "killed"):
        raise AssertionError("; ".join(found))


def _run(case: Case, folder: Path, run: str, seconds: float | None) -> tuple[int, str]:
    """One start; the status, negative if killed after so many seconds, and what it wrote."""
    key = _OUTPUT_KEYS[case.command]
    config = folder / f"{run}.yaml"
    config.write_text(yaml.safe_dump(case.values | {key: str(folder / run)}))
    words = [sys.executable, "-m", "mlx_mmfree", case.command, "-c", str(config)]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    log = folder / f"{run}.out"
    with log.open("w") as output:
        processes = start_group(
            words, case.processes, folder, own, cwd=folder, stdout=output, stderr=output
        )
        try:
            has_ended = _wait(processes, _TIMEOUT_S if seconds is None else seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if seconds is None and not has_ended:
        return _LATE, log.read_text()
    ended = [process.returncode for process in processes]
    return next((status for status in ended if status), 0), log.read_text()


def _wait(processes: Sequence[subprocess.Popen[str]], seconds: float) -> bool:
    """Returns whether all end within so many seconds."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def differences(whole: Path, killed: Path) -> list[str]:
    """All files but pictures and cards have the same bytes, all records of the log the same metrics."""
    found = []
    names = [{p.relative_to(run) for p in run.rglob("*") if p.is_file()} for run in (whole, killed)]
    found += [f"{path} is in one run only" for path in sorted(names[0] ^ names[1])]
    for path in sorted(names[0] & names[1]):
        if path.name == "log.jsonl":
            logs = [_log(run / path) for run in (whole, killed)]
            found += [f"{a} and {b}" for a, b in zip(*logs, strict=False) if a != b]
            if len(logs[0]) != len(logs[1]):
                found.append(f"{path} has {len(logs[0])} and {len(logs[1])} records")
        elif path.name in _OF_THE_FOLDER or path.suffix == ".png":
            continue
        elif (whole / path).read_bytes() != (killed / path).read_bytes():
            found.append(f"{path} differs")
    return found


def _log(path: Path) -> list[str]:
    return [
        json.dumps({k: v for k, v in record.items() if k not in _OF_THE_MACHINE})
        for record in read_log(path)
    ]
