"""The new files of this folder are found by its own tests and by no others."""

from collections.abc import Iterator

import pytest

from tests.adding import search_path


@pytest.fixture(autouse=True, scope="module")
def added() -> Iterator[None]:
    search_path.extend()
    yield
    search_path.retract()
