"""A plugin of pytest for `record`: each test is a context of the coverage of its process."""

import json
import os
from collections.abc import Generator

import pytest
from coverage import Coverage

from tests.mutation.coverage_map import FOLDER

_seconds: dict[str, float] = {}
_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    coverage = Coverage.current()
    assert coverage is not None, "coverage starts with each process of the tests"
    coverage.switch_context(item.nodeid)
    start = sum(os.times()[:4])
    result = yield
    _seconds[item.nodeid] = sum(os.times()[:4]) - start
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # such as those that let no file grow
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """Stores what this process has recorded: it ends without Python's usual exit."""
    if _seconds:
        coverage = Coverage.current()
        assert coverage is not None
        coverage.stop()
        coverage.save()
        found = {"seconds": _seconds, "failed": sorted(_failed)}
        (FOLDER / f"{os.getpid()}.tests").write_text(json.dumps(found))
