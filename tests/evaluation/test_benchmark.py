"""Measurements: their records, limits and processes; no test looks at how fast anything is."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import demo
from mlx_mmfree.errors import MeasurementError
from mlx_mmfree.evaluation.benchmark import (
    MODEL,
    MULTIPLY,
    READ,
    Record,
    check_ending,
    measure,
    metrics,
    result_or_failure,
)
from mlx_mmfree.platform.memory_reader import MemoryReader, _shares, memory_reader

AMOUNTS = {"prompt_tokens": [4], "positions": [2], "decoded_tokens": 1, "rounds": 2}


@pytest.fixture
def reader() -> Iterator[MemoryReader]:
    with memory_reader() as made:
        yield made


@pytest.mark.parametrize("dtype", [mx.uint32, mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reader_takes_every_array(reader: MemoryReader, dtype: mx.Dtype, size: int) -> None:
    assert reader.seconds([mx.ones((size,), dtype), mx.ones((2, size), dtype)]) > 0


def test_reader_leaves_the_callers_processors_alone(reader: MemoryReader) -> None:
    affinity = getattr(os, "sched_getaffinity", lambda _: None)
    before = affinity(0)
    assert reader.seconds([mx.ones((2**14,))], 2) > 0
    assert affinity(0) == before


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[10], [1, 5, 100, 3], [1, 1]])
def test_threads_share_every_word_once(sizes: list[int], count: int) -> None:
    words = np.arange(sum(sizes))
    shares = _shares(np.split(words, np.cumsum(sizes)[:-1]), count)
    assert len(shares) == count
    read = np.concatenate([part for share in shares for part in share])
    assert sorted(read.tolist()) == words.tolist()
    lengths = [sum(part.size for part in share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


def record(name: str, limit: str, own: tuple, plain: tuple, threads: int = 1) -> Record:
    return Record(name, threads, limit, 100, 1000, own, plain, "tokens", 8)


def test_a_record_is_compared_round_by_round() -> None:
    measured = record("a", READ, (4.0, 2.0, 8.0), (1.0, 1.0, 4.0))
    # the ratio of each round, then the median: 1/4, 1/2, 1/2
    assert measured.share == 0.5
    assert measured.limit_rate == 100
    assert record("a", MULTIPLY, (1.0,), (2.0,)).limit_rate == 500


def test_processes_with_slow_memory_are_shown_but_do_not_count() -> None:
    rates = {1.0: 0.5, 1.2: 0.7, 1.3: 0.1}
    records = [record("a", READ, (plain / share,), (plain,)) for plain, share in rates.items()]
    [figure] = metrics(records)
    assert [r.limit_rate for r in figure.counted] == [100, pytest.approx(100 / 1.2)]
    assert figure.share == pytest.approx(0.6)
    shown = figure.to_json()
    assert [process["is_counted"] for process in shown["processes"]] == [True, True, False]
    assert shown["seconds"] == pytest.approx((2.0 + 1.2 / 0.7) / 2)
    assert shown["rate"] == pytest.approx(8 / shown["seconds"])


def test_metrics_are_apart_by_name_threads_and_limit() -> None:
    kinds = [("a", READ, 1), ("a", READ, 2), ("a", MULTIPLY, 1), ("b", READ, 1)]
    records = [record(name, limit, (1.0,), (1.0,), threads) for name, limit, threads in kinds]
    assert [len(figure.records) for figure in metrics(records + records)] == [2] * 4


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import sys; sys.exit('first\\nthe reason')", "status 1. the reason"),
        ("import sys; sys.exit(3)", "status 3. It did not say why."),
        (
            "import os; os.kill(os.getpid(), 9)",
            "SIGKILL, which the system sends when memory is short",
        ),
        ("import os; os.kill(os.getpid(), 15)", "the signal SIGTERM. It did not"),
    ],
)
def test_how_a_process_ended(code: str, line: str) -> None:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    with pytest.raises(MeasurementError, match=r"^\[bench\] a test ended with ") as failure:
        check_ending("a test", process.returncode, process.stderr)
    assert line in str(failure.value)


@pytest.mark.exhaustive
def test_a_fresh_process_measures() -> None:
    arguments = {"name": "a", "source": str(demo.path()), **AMOUNTS}
    found = measure(MODEL, arguments, 3)
    records = [Record(**record) for record in found["records"]]
    assert [record.name for record in records] == ["a: prefill of 4", "a: decode after 2"]
    for record in records:
        assert (record.threads, len(record.seconds), len(record.limit_seconds)) == (3, 2, 2)
    assert found["memory"]["tensor_bytes"] > 0
    with pytest.raises(MeasurementError) as failure:
        measure(MODEL, {**arguments, "rounds": "x"}, 1)
    assert str(failure.value).startswith(f"[bench] the measurement of {MODEL} failed: TypeError in")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"decoded_tokens": "x"}, rf"[bench] the measurement of {MODEL} failed: TypeError in "),
        ({"source": "no-such-folder"}, "[load] 'path_or_repo' must "),
    ],
)
def test_a_task_that_fails_says_why_in_one_line(arguments: dict[str, Any], line: str) -> None:
    given = {"name": "a", "source": str(demo.path()), **AMOUNTS, **arguments}
    failure = result_or_failure(MODEL, given)["failure"]
    assert failure.startswith(line) and "\n" not in failure
