"""The plain read on Metal, the limit of the benchmark, reads all words once."""

import mlx.core as mx
import pytest

from mlx_mmfree.ops import kernel_times
from mlx_mmfree.ops.backend import self_check
from mlx_mmfree.platform import memory_reader
from tests.emulator.emulator import Emulator

pytestmark = pytest.mark.metal


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_checks", {})
    monkeypatch.setattr(memory_reader, "LEAST_SECONDS", 0.0)


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("rows", [1, 4, 33])
@pytest.mark.parametrize("width", [8, 32, 75])
def test_every_word_counts(rows: int, width: int) -> None:
    words = self_check.packed_pattern(rows, width)
    got, want = kernel_times.plain_read(words), kernel_times._definition(words)
    assert mx.allclose(got, want, rtol=1e-6).item()
    assert kernel_times.plain_read_fault() is None


def test_bits_of_all_rows_and_steps_are_merged() -> None:
    words = mx.zeros((8, 64), mx.uint32)
    words[0, 0], words[3, 32], words[3, 33], words[4, 63] = 1, 2, 16, 128
    assert kernel_times._definition(words).tolist() == [3 + 16, 128]


def test_what_is_read_and_stored(emulated: Emulator) -> None:
    arrays = [mx.zeros((32, 40), mx.uint32), mx.zeros((64, 16), mx.bfloat16), mx.zeros((3,))]
    assert kernel_times.read_seconds(arrays) is not None
    _, *passes = emulated.records
    assert [record.loaded["words"] for record in passes] == [32 * 40 * 4, 64 * 16 * 2] * 2
    assert [record.stored["out"] for record in passes] == [8 * 4, 16 * 4] * 2


def test_a_broken_kernel_is_no_limit(emulated: Emulator) -> None:
    emulated.edit = lambda text: text.replace("word += 32", "word += 33")
    with pytest.warns(RuntimeWarning, match="plain_read"):
        assert kernel_times.read_seconds([mx.zeros((32, 40), mx.uint32)]) is None


def test_seconds_of_a_queue_are_those_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by a second for each pass that is started."""
    started = []
    monkeypatch.setattr(memory_reader, "LEAST_SECONDS", 7.5)
    monkeypatch.setattr(memory_reader, "perf_counter", lambda: float(len(started)))
    monkeypatch.setattr(mx, "async_eval", started.append)
    built = []

    def build() -> list[mx.array]:
        # all graphs of a queue are built before it starts
        assert len(started) in (0, 1)
        built.append(len(started))
        return [mx.array(1)]

    assert memory_reader.queued_seconds(build) == 1.0
    assert built == [0] + [1] * 8
