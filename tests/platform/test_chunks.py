"""Large requests to a confined process, and its large answers, cross in small chunks."""

import json
import marshal
from typing import Any

import pytest

from mlx_mmfree.platform.confinement.chunks import SIZE, Builder, chunks


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, "b", None, 2.5, True], "c": {}},
        "é" * (3 * SIZE + 1),
        list(range(100_000)),
        [["x" * 100, []]] * 5000,
        {str(number): {"value": number} for number in range(20_000)},
        {"long " * SIZE: ["text " * SIZE, {"deep": ["w" * 2 * SIZE] * 3}, "end"]},
    ],
    ids=["small", "text", "ids", "list", "object", "nested"],
)
def test_values_are_put_together_again(value: Any) -> None:
    builder = Builder()
    for chunk in chunks(value):
        text = json.dumps(chunk)
        assert len(text) < 7 * SIZE
        builder.add(json.loads(text))
    assert builder.value == value


def test_requests_hold_more_kinds_of_data() -> None:
    request = ("name", b"\xff" * (3 * SIZE), {"long": ("a", b"b" * 9) * SIZE, "ids": [1, 2]}, None)
    builder = Builder()
    for chunk in chunks(request):
        data = marshal.dumps(chunk)
        assert len(data) < 7 * SIZE
        builder.add(marshal.loads(data))
    assert builder.value == request
