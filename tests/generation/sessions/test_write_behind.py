"""The thread that writes: order, what is given up, and that nobody waits for it in vain."""

from threading import Event

import pytest

from mlx_mmfree.generation.storage.keys import TextKey
from mlx_mmfree.generation.storage.write_behind import WriteBehind


def key(number: int) -> TextKey:
    return TextKey(b"digest", number)


class Recorder:
    """Notes jobs once it may go on."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str]] = []
        self.has_begun, self.may_go_on = Event(), Event()

    def __call__(self, text: TextKey, job: str) -> None:
        self.has_begun.set()
        self.may_go_on.wait()
        self.done.append((text.length, job))


def test_jobs_are_done_in_order_once_each() -> None:
    recorder = Recorder()
    writer = WriteBehind(recorder, 100)
    writer.flush()
    assert [writer.add(key(n), job, 1) for n, job in [(1, "a"), (2, "b"), (1, "c"), (2, "d")]] == [
        *(0, 0, 0, 0)
    ]
    assert len(writer) == 2
    recorder.may_go_on.set()
    writer.flush()
    assert recorder.done == [(1, "a"), (2, "b")] and len(writer) == 0
    writer.add(key(1), "e", 1)
    writer.close()
    assert recorder.done[2:] == [(1, "e")]


def test_the_oldest_are_given_up_while_too_much_waits() -> None:
    recorder = Recorder()
    writer = WriteBehind(recorder, 10)
    writer.add(key(1), "a", 4)
    recorder.has_begun.wait()
    assert [writer.add(key(n), "b", 4) for n in (2, 3, 4)] == [0, 0, 1]
    assert writer.add(key(5), "large", 50) == 2
    recorder.may_go_on.set()
    writer.close()
    assert recorder.done == [(1, "a"), (5, "large")]


def test_a_closed_writer_takes_nothing() -> None:
    writer = WriteBehind(Recorder(), 10)
    writer.close()
    writer.close()
    writer.flush()
    with pytest.raises(RuntimeError, match="must not be used after 'close'"):
        writer.add(key(1), "a", 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_failed() -> None:
    may_fail = Event()

    def fail(text: TextKey, job: str) -> None:
        may_fail.wait()
        raise AssertionError("a fault of the library")

    writer = WriteBehind(fail, 10)
    writer.add(key(1), "a", 1)
    writer.add(key(2), "b", 1)
    may_fail.set()
    writer.flush()
    writer.close()
    assert len(writer) == 0
