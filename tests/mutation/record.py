"""Records which tests run which lines of the package: `python -m tests.mutation.record`.

The map lies in `build/mutation`, and is recorded anew when it should know new tests or new code. What
a process does that a test starts counts for the test. With files or folders of tests as arguments, the
map knows these alone, which is enough for the mutants of a few files.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence

import pytest
from coverage import Coverage

from tests.mutation.coverage_map import FOLDER, LINES, MARKERS, SECONDS
from tests.mutation.mutants import PARTS

# what else there is starts processes, and runs the same lines
_TESTS = (*(folder for part in PARTS.values() for folder in part), "goldens", "native")
_TESTS += ("cli/test_lora_images.py", "cli/test_runs.py")
_TESTS += ("test_arguments.py", "test_docstrings.py", "test_public_api.py")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    usual = [f"tests/{name}" for name in _TESTS]
    parser.add_argument("tests", nargs="*", default=usual, help="files or folders of tests")
    arguments = parser.parse_args(argv)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    settings = FOLDER / "processes.toml"
    # pytest tells processes that it starts which test is running
    settings.write_text(
        f'[tool.coverage.run]\nsource_pkgs = ["mlx_mmfree"]\ndata_file = "{LINES}"\n'
        'parallel = true\nsigterm = true\ncontext = "${PYTEST_CURRENT_TEST-}"\n'
    )
    os.environ["COVERAGE_PROCESS_START"] = str(settings)
    options = ["-n", str(arguments.jobs), "-q", "-m", MARKERS, "-p", "no:cacheprovider"]
    pytest.main([*options, "-p", "tests.mutation.recorder", *arguments.tests])
    coverage = Coverage(data_file=str(LINES), config_file=False)
    coverage.combine([str(FOLDER)], keep=False)
    coverage.save()
    seconds: dict[str, float] = {}
    failed: set[str] = set()
    for file in FOLDER.glob("*.tests"):
        found = json.loads(file.read_text())
        seconds |= found["seconds"]
        failed |= {*found["failed"]}
    seconds = {name: s for name, s in seconds.items() if name not in failed}
    SECONDS.write_text(json.dumps(seconds))
    print(f"{len(seconds)} tests are known; {len(failed)} cannot be recorded.")
    return int(not seconds)


if __name__ == "__main__":
    sys.exit(main())
