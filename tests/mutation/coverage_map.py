"""The map that `python -m tests.mutation.record` makes: which tests run which lines of the package."""

import json
import sys
from collections.abc import Mapping
from functools import cache
from itertools import groupby
from pathlib import Path

from coverage import CoverageData

from tests.mutation.mutants import Mutant

CHECKOUT = Path(__file__).parents[2]
FOLDER = CHECKOUT / "build" / "mutation"
LINES, SECONDS = FOLDER / "lines.sqlite", FOLDER / "seconds.json"

# tests of extras that take little to install
MARKERS = "not agents and not browser and not eval and not interop and not report and not slow"
_SETS_OF_PARAMETERS = 4
# a change of a default in the public interface is a mistake even where nothing relies on it
_SIGNATURES = "tests/test_public_api.py::test_signatures_are_frozen"


class CoverageMap:
    """Chooses the tests of a mutant.

    Raises:
        FileNotFoundError: No map was recorded.
    """

    def __init__(self) -> None:
        self._seconds: Mapping[str, float] = json.loads(SECONDS.read_text())
        self._data = CoverageData(str(LINES))
        self._data.read()

    def tests(self, mutant: Mutant, budget_s: float) -> dict[str, list[str]]:
        """Tests that run a line of a mutant, by file.

        Files with the mutant's name come first, then files of its folder, then what takes least. Of a
        function of tests there are a few sets of parameters, the ones with the name of the mutant's file
        if there are any.

        Args:
            mutant: The mutant.
            budget_s: How much time they may take together; there is at least one.
        """
        folder, stem = mutant.file.split("/")[0], Path(mutant.file).stem
        found = self._names(mutant) | ({_SIGNATURES} if mutant.kind == "default" else set())
        names = sorted(name for name in found if name in self._seconds)
        files: dict[str, list[str]] = {}
        for function, group in groupby(names, lambda name: name.partition("[")[0]):
            every = [*group]
            some = [name for name in every if stem in name.partition("[")[2]] or every
            some = some[:: -(-len(some) // _SETS_OF_PARAMETERS)]
            files.setdefault(function.partition("::")[0], []).extend(some)

        def rank(file: str) -> tuple[bool, bool, float]:
            is_other = f"tests/{folder}/" not in file
            return (
                is_other or stem not in file,
                is_other,
                sum(self._seconds[name] for name in files[file]),
            )

        chosen: dict[str, list[str]] = {}
        left = budget_s
        for file in sorted(files, key=rank):
            for name in files[file]:
                if left > 0:
                    chosen.setdefault(file, []).append(name)
                    left -= self._seconds[name]
        return chosen

    def _names(self, mutant: Mutant) -> set[str]:
        """All tests that run a line of a mutant.

        Of what runs on import these are also those that run its function or class, else its file, else
        its folder.
        """
        file = CHECKOUT / "mlx_mmfree" / mutant.file
        first, last = mutant.lines
        tests = self._data.contexts_by_lineno(str(file))
        found = {name for line in range(first, last + 1) for name in tests.get(line, ())}
        if "" in found:
            later = self._later(file, mutant.scope) or self._later(file)
            for other in sorted(file.parent.glob("*.py")) if not later else ():
                later |= self._later(other)
            found = found - {""} | later
        if not found:
            found = self._of_users(file)
        return {each for name in found for each in self._of_context(name)}

    def _of_users(self, file: Path) -> set[str]:
        """The tests of what runs where nothing is recorded, as in a process that is killed.

        They are those that run a file of the package that names it, and those of files that name it.
        """
        others = (each for each in (CHECKOUT / "mlx_mmfree").rglob("*.py") if each != file)
        users = [each for each in others if file.stem in _text(each)]
        return {name for each in users for name in self._later(each)} | {
            name for name in self._seconds if file.stem in _text(CHECKOUT / name.partition("::")[0])
        }

    def _later(self, file: Path, lines: tuple[int, int] = (1, sys.maxsize)) -> set[str]:
        """The tests that run some lines of a file, but for what runs on import."""
        tests = self._data.contexts_by_lineno(str(file))
        first, last = lines
        return {
            name
            for line, names in tests.items()
            if first <= line <= last and "" not in names
            for name in names
        }

    def _of_context(self, context: str) -> list[str]:
        """The tests of a context: all of a file for a process that a fixture has started."""
        test, _, phase = context.partition(" (")
        if phase.startswith("setup"):
            file = test.partition("::")[0]
            return [name for name in self._seconds if name.startswith(f"{file}::")]
        return [test]


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
