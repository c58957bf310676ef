"""Shared parts of the tests of the benchmarks. Programs import each other as files beside them."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import MeasurementError
from mlx_mmfree.evaluation.benchmark import result_or_failure
from tests.ops.conftest import emulated as emulated

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

Measure = Callable[..., Any]


@pytest.fixture
def here() -> Iterator[Measure]:
    """Stands for `measure`, but in this process, since starting others takes most of the time."""
    device = mx.default_device()

    def measure(
        function: str, arguments: Any, threads: int = 0, seconds: float | None = None
    ) -> Any:
        found = result_or_failure(function, json.loads(json.dumps(arguments)))
        if "failure" in found:
            raise MeasurementError(found["failure"])
        return json.loads(json.dumps(found["result"]))

    yield measure
    mx.set_default_device(device)
