"""Exchanges run one after another, and none begins after one has failed."""

from threading import Event

import mlx.core as mx
import pytest

from mlx_mmfree.training.data_parallel import Exchanges


def test_an_exchange_begins_when_the_one_before_has_ended() -> None:
    begun: list[int] = []
    go_on = Event()

    def first() -> mx.array:
        go_on.wait()
        begun.append(1)
        return mx.array(1)

    def second() -> mx.array:
        begun.append(2)
        return mx.array(2)

    exchanges = Exchanges()
    results = [exchanges.add(first), exchanges.add(second)]
    assert begun == []
    go_on.set()
    assert [result.result().item() for result in results] == [1, 2]
    assert begun == [1, 2]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_none_begins_after_one_has_failed(kind: type[Exception]) -> None:
    begun: list[int] = []

    def lost() -> mx.array:
        raise kind("[ring] lost")

    def late() -> mx.array:
        begun.append(1)
        return mx.array(1)

    exchanges = Exchanges()
    for result in (exchanges.add(lost), exchanges.add(late), exchanges.add(late)):
        with pytest.raises(kind, match="lost"):
            result.result(timeout=60)
    assert begun == []
