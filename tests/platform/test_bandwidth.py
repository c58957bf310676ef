"""The measured rate of plain reads."""

import mlx.core as mx
import pytest

from mlx_mmfree.platform import bandwidth


def test_rate_is_positive_and_the_method_is_stated() -> None:
    found = bandwidth.read_bandwidth(3 * 2**20)
    assert found.bytes_per_second > 0
    assert found.method.startswith("largest word of 3 MiB by ")


def test_little_memory_gives_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "available_memory_bytes", lambda: 8 * 2**20)
    assert "of 2 MiB" in bandwidth.read_bandwidth().method


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the device is not the CPU")
@pytest.mark.parametrize(("threads", "readers"), [(1, "on 1 thread,"), (3, "on 3 threads,")])
def test_threads_read_the_whole_buffer(
    threads: int, readers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "thread_count", lambda: threads)
    assert readers in bandwidth.read_bandwidth(2**20).method
