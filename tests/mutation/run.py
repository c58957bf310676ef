"""Tests the tests: `python -m tests.mutation.run` says which of 200 mutants of the package they find.

Each mutant lies in a copy of the checkout, where the tests that run the changed lines are started until
one fails. `python -m tests.mutation.record` records which these are. Survivors that are known, each with
its reason, stand in `survivors.py`. The status is 1 if there are others, or if less than 80 % are found.
Those that are listed there but are no longer among the mutants, as code was renamed, or that a test
finds by now, are reported: they can go from the list.
"""

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest
from pytest import ExitCode

from tests.mutation.coverage_map import CHECKOUT, MARKERS, CoverageMap
from tests.mutation.mutants import PARTS, Mutant, chosen
from tests.mutation.survivors import SURVIVORS

LEAST_FOUND = 0.8
COUNT, SEED = 200, 0
_BUDGET_S = 20.0
_CPU_LIMIT_S, _WALL_LIMIT_S, _MEMORY_LIMIT = 60, 900, 3 * 2**30
_LEFT_OUT = shutil.ignore_patterns(".git", "build", "*_cache", ".venv")
# imported once, before the processes of the mutants begin; they start no threads
_WARM = (
    *("hypothesis", "jinja2", "mlx.core", "mlx.nn", "mlx.optimizers", "mlx.utils", "numpy", "yaml"),
    *("huggingface_hub", "prompt_toolkit", "sentencepiece", "tokenizers", "tqdm", "httpx2"),
    *("llguidance", "prometheus_client", "pydantic", "starlette.testclient", "uvicorn"),
)
Task = tuple[Mutant, dict[str, list[str]]]


@dataclass
class Slot:
    """A copy of the checkout that one mutant at a time has.

    Attributes:
        folder: The copy.
        mutant: The mutant in it.
        begin: When its tests began.
    """

    folder: Path
    mutant: Mutant
    begin: float = 0.0

    @property
    def file(self) -> Path:
        return self.folder / "mlx_mmfree" / self.mutant.file

    @property
    def finder(self) -> Path:
        """Holds the name of the test that failed."""
        return self.folder.with_suffix(".found")


class Only:
    """A plugin of pytest that runs some tests alone, and keeps the name of the one that fails."""

    def __init__(self, tests: Sequence[str], finder: Path):
        self._tests = {*tests}
        self._finder = finder

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._tests]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._finder.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._finder.write_text(report.nodeid)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="which mutants")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--minutes",
        type=float,
        default=20,
        help="how long it may take, about; less tries fewer tests",
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this in their names")
    arguments = parser.parse_args(argv)
    end = time.monotonic() + 60 * arguments.minutes
    every = chosen(CHECKOUT / "mlx_mmfree", arguments.count, arguments.seed)
    if (arguments.count, arguments.seed) == (COUNT, SEED):
        for name in sorted(SURVIVORS.keys() - {mutant.name for mutant in every}):
            print(f"stale in survivors.py, as it is no longer among the mutants: {name}")
    mutants = [
        mutant
        for mutant in every
        if mutant.part in arguments.part and arguments.only in mutant.name
    ]
    # these take all the time that they get
    mutants.sort(key=lambda mutant: mutant.name in SURVIVORS)
    for name in _WARM:
        import_module(name)
    coverage_map = CoverageMap()
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder, f"checkout{job}") for job in range(arguments.jobs)]
        for copy in copies:
            shutil.copytree(CHECKOUT, copy, ignore=_LEFT_OUT)
        tasks = _tasks(mutants, coverage_map, end, arguments.jobs)
        found = {}
        for mutant, finder, seconds in finders(tasks, copies):
            if finder:
                found[mutant.name] = finder
            text = finder or f"SURVIVES: {SURVIVORS.get(mutant.name, 'no reason is known')}"
            print(f"{seconds:4.0f} s  {mutant.name}: {text}", flush=True)
        failed = [finder for _, finder, _ in finders(_sound(found.values()), copies) if finder]
    return _report(mutants, found, failed)


def _tasks(
    mutants: Sequence[Mutant], coverage_map: CoverageMap, end: float, jobs: int
) -> Iterator[Task]:
    """Each mutant with its tests, which take no longer than its share of the time until the end."""
    for index, mutant in enumerate(mutants):
        share = jobs * (end - time.monotonic()) / (len(mutants) - index)
        yield mutant, coverage_map.tests(mutant, max(1.0, min(_BUDGET_S, share)))


def _sound(tests: Iterable[str]) -> Iterator[Task]:
    """Tests, by file, for a package without a mistake."""
    source = (CHECKOUT / "mlx_mmfree/__init__.py").read_text("utf-8")
    none = Mutant("__init__.py", "", "", (0, 0), (0, 0), source)
    for file, names in groupby(sorted({*tests}), lambda name: name.partition("::")[0]):
        if own := [name for name in names if "::" in name]:
            yield none, {file: own}


def _report(mutants: Sequence[Mutant], found: dict[str, str], failed: Sequence[str]) -> int:
    for part in PARTS:
        own = [each.name in found for each in mutants if each.part == part]
        print(f"{part}: {sum(own)} of {len(own)}")
    kinds = Counter(each.kind for each in mutants)
    kinds_found = Counter(each.kind for each in mutants if each.name in found)
    print(", ".join(f"{kind}: {kinds_found[kind]} of {kinds[kind]}" for kind in sorted(kinds)))
    unknown = [each for each in mutants if each.name not in found and each.name not in SURVIVORS]
    for mutant in unknown:
        print(f"survives without a reason: {mutant.name}")
    for name in sorted(found.keys() & SURVIVORS.keys()):
        print(f"found, and can go from survivors.py: {name}")
    share = len(found) / max(len(mutants), 1)
    print(
        f"{len(found)} of {len(mutants)} mutants are found, {share:.0%}, "
        f"in {sum(os.times()[:4]):.0f} s of processor time."
    )
    for name in failed:
        print(f"{name} fails without a mutant too.", file=sys.stderr)
    return int(share < LEAST_FOUND or bool(unknown) or bool(failed))


def finders(tasks: Iterable[Task], copies: Sequence[Path]) -> Iterator[tuple[Mutant, str, float]]:
    """Each mutant, what finds it, or nothing, and the processor time; one at a time in each copy."""
    free = [*copies]
    running: dict[int, Slot] = {}
    waiting = iter(tasks)
    while True:
        while free and (task := next(waiting, None)) is not None:
            slot = Slot(free.pop(), task[0], time.monotonic())
            running[_start(slot, task[1])] = slot
        if not running:
            return
        process, status, seconds = _ended(running)
        slot = running.pop(process)
        shutil.copy2(CHECKOUT / "mlx_mmfree" / slot.mutant.file, slot.file)
        free.append(slot.folder)
        finder = slot.finder.read_text() if slot.finder.exists() else ""
        if not finder and os.WIFSIGNALED(status):
            # as at the limits of time and memory
            finder = f"signal {os.WTERMSIG(status)}"
        elif not finder and status:
            raise RuntimeError(f"The tests of {slot.mutant.name} did not end as they should.")
        yield slot.mutant, finder, seconds


def _start(slot: Slot, tests: dict[str, list[str]]) -> int:
    """The process that runs the tests of some files with a mutant, until one fails."""
    slot.finder.unlink(missing_ok=True)
    slot.file.write_text(slot.mutant.source, encoding="utf-8")
    if process := os.fork():
        return process
    status = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_LIMIT_S, _CPU_LIMIT_S))
        status = _run(slot.folder, tests, slot.finder)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run(copy: Path, tests: dict[str, list[str]], finder: Path) -> int:
    """Runs tests of files in this process; 1 if one fails."""
    output = os.open(copy.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    # the package and the tests come from the copy
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(CHECKOUT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "mlx_mmfree")]:
        del sys.modules[name]
    options = ["-n", "0", "-x", "-q", "--exhaustive", "-p", "no:cacheprovider", "-m", MARKERS]
    # what was imported early is a plugin of pytest too
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    for file, names in tests.items():
        status = pytest.main([*options, file], plugins=[Only(names, finder)])
        if not finder.exists() and status not in (ExitCode.OK, ExitCode.NO_TESTS_COLLECTED):
            finder.write_text(f"{file} does not start")
        if finder.exists():
            return 1
    return 0


def _ended(running: dict[int, Slot]) -> tuple[int, int, float]:
    """Waits for one process to end, or ends it: itself, its status and its processor time."""
    while True:
        process, status, usage = os.wait4(-1, os.WNOHANG)
        if process:
            # what its tests have started goes with it
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            return process, status, usage.ru_utime + usage.ru_stime
        for process, slot in running.items():
            is_late = time.monotonic() - slot.begin > _WALL_LIMIT_S
            if is_late or _resident_bytes(process) > _MEMORY_LIMIT:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
        time.sleep(0.05)


def _resident_bytes(process: int) -> int:
    """The memory of a process; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
