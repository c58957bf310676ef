"""The measured rate of plain reads."""

import mlx.core as mx
import pytest

from mlx_mmfree.platform import memory_reader


def test_rate_is_positive_and_the_method_is_stated() -> None:
    found = memory_reader.read_bandwidth(3 * 2**20)
    assert found.bytes_per_second > 0
    assert "maximum over the buffer" in found.method
    assert "; 3 MiB, " in found.method


def test_little_memory_gives_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reader, "available_memory_bytes", lambda: 8 * 2**20)
    assert "; 2 MiB, " in memory_reader.read_bandwidth().method


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the device is not the CPU")
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_read_the_whole_buffer(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reader, "thread_count", lambda: threads)
    assert f"threads: {threads}," in memory_reader.read_bandwidth(2**20).method
