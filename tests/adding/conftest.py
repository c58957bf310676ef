"""The new files are found in these tests and in no other."""

from collections.abc import Iterator

import pytest

from tests.adding import search_path


@pytest.fixture(autouse=True, scope="module")
def added() -> Iterator[None]:
    search_path.extend()
    yield
    search_path.retract()
