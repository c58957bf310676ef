"""One thread and several are measured in turn beside busy processes."""

import pytest
from busy import TASKS, compare


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", TASKS)
def test_pairs_of_seconds(task: str) -> None:
    pairs = compare(task, threads=2, busy=1, rounds=1)
    assert len(pairs) == 1
    assert all(seconds > 0 for pair in pairs for seconds in pair)
