"""Records which tests run which lines of the package: `python -m tests.mutation.record`.

The map lies in `build/mutation`, and is recorded anew when it should know new tests or new code. What
a process does that a test starts counts for the test.
"""

import json
import os
import shutil
import sys
from collections.abc import Generator

import pytest
from coverage import Coverage

from tests.mutation.coverage_map import FOLDER, LINES, MARKERS, SECONDS
from tests.mutation.mutants import PARTS

# what else there is starts processes, and runs the same lines
_PATHS = (*(folder for part in PARTS.values() for folder in part), "goldens", "native")
_PATHS += ("test_docstrings.py", "test_public_api.py")


class Recorder:
    """A plugin of pytest: each test is a context of the coverage.

    Attributes:
        seconds: The processor time of each test.
        failed: Tests that fail while they are recorded, such as those that let no file grow.
    """

    def __init__(self, coverage: Coverage):
        self._coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        begin = sum(os.times()[:4])
        result = yield
        self.seconds[item.nodeid] = sum(os.times()[:4]) - begin
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    settings = FOLDER / "processes.toml"
    # pytest tells processes that it starts which test is running
    settings.write_text(
        f'[tool.coverage.run]\nsource_pkgs = ["mlx_mmfree"]\ndata_file = "{LINES}"\n'
        'parallel = true\nsigterm = true\ncontext = "${PYTEST_CURRENT_TEST-}"\n'
    )
    os.environ["COVERAGE_PROCESS_START"] = str(settings)
    coverage = Coverage(data_file=str(LINES), source_pkgs=["mlx_mmfree"], config_file=False)
    coverage.start()
    recorder = Recorder(coverage)
    paths = [f"tests/{name}" for name in _PATHS]
    arguments = ["-n", "0", "-q", "-m", MARKERS, "-p", "no:cacheprovider", *paths]
    pytest.main(arguments, plugins=[recorder])
    coverage.stop()
    coverage.save()
    coverage.combine([str(FOLDER)], keep=False)
    coverage.save()
    seconds = {name: s for name, s in recorder.seconds.items() if name not in recorder.failed}
    SECONDS.write_text(json.dumps(seconds))
    print(f"{len(seconds)} tests are known; {len(recorder.failed)} cannot be recorded.")
    return int(not seconds)


if __name__ == "__main__":
    sys.exit(main())
