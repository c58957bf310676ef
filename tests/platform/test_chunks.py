"""Large answers cross from the confined process in small chunks."""

import json
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
