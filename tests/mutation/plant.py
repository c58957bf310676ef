"""Plants faults into a copy of the package, one by one, and tells which of them the tests find.

`python -m tests.mutation.plant` takes minutes and ends with status 1 if more than one is missed;
`--only TEXT` plants those alone whose names hold the text. The checkout stays as it is.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutation.faults import FAULTS, Fault

CHECKOUT = Path(__file__).parents[2]
MOST_MISSED = 1

_LEFT_OUT = shutil.ignore_patterns(".git", "build", "*_cache", ".venv")
_PASSED, _FAILED = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="faults with this in their names"
    )
    args = parser.parse_args(argv)
    faults = {name: fault for name, fault in FAULTS.items() if args.only in name}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        shutil.copytree(CHECKOUT, copy, ignore=_LEFT_OUT)
        finders = {name: _finder(copy, name, fault) for name, fault in faults.items()}
        found = sorted({finder for finder in finders.values() if finder})
        status, output = _run(copy, found) if found else (_PASSED, "")
    missed = sum(finder is None for finder in finders.values())
    print(f"{len(faults) - missed} of {len(faults)} faults are found.")
    if status != _PASSED:
        print(f"{output}\nThese tests fail without a fault too.", file=sys.stderr)
    return int(status != _PASSED or missed > MOST_MISSED)


def _finder(copy: Path, name: str, fault: Fault) -> str | None:
    """The first test that fails with a fault."""
    begin = time.monotonic()
    with _planted(copy, fault):
        status, output = _run(copy, [f"tests/{test}" for test in fault.tests])
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\w+)", output, re.MULTILINE)
    if status not in (_PASSED, _FAILED) or (status == _FAILED and failed is None):
        raise RuntimeError(f"{name}: the tests did not end as they should\n{output}")
    finder = failed[1] if failed else None
    print(f"{time.monotonic() - begin:4.0f} s  {name}: {finder or 'NOT FOUND'}", flush=True)
    return finder


@contextmanager
def _planted(copy: Path, fault: Fault) -> Iterator[None]:
    file = copy / "mlx_mmfree" / fault.file
    sound = file.read_text(encoding="utf-8")
    if sound.count(fault.text) != 1:
        raise RuntimeError(f"'{fault.file}' must hold {fault.text!r} once. Change the table.")
    file.write_text(sound.replace(fault.text, fault.fault), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(sound, encoding="utf-8")


def _run(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The status of pytest and what it wrote."""
    command = [sys.executable, "-m", "pytest", "--exhaustive", "-x", "-q", "-n", "0"]
    command += ["-p", "no:cacheprovider"]
    # a bytecode file of the same second and size would pass for the changed source's
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
