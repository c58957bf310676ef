"""Orders of numbers without a list of them."""

import numpy as np
import pytest

from mlx_mmfree.training.corpus.mixture import keyed_order


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1025])
def test_every_number_comes_once(count: int) -> None:
    order = [keyed_order(index, count, b"a") for index in range(count)]
    assert sorted(order) == list(range(count))


def test_a_key_decides_the_order() -> None:
    orders = [[keyed_order(n, 100, key) for n in range(100)] for key in (b"a", b"b", b"a")]
    assert orders[0] == orders[2] != orders[1]


def test_the_order_is_spread_evenly() -> None:
    count, parts = 2048, 8
    counts = np.zeros((parts, parts))
    for index in range(count):
        counts[index * parts // count, keyed_order(index, count, b"a") * parts // count] += 1
    # a chi-squared statistic of 49 degrees of freedom; 1 in 10^6 random orders reaches 109
    expected = count / parts**2
    assert ((counts - expected) ** 2 / expected).sum() < 109


def test_it_reaches_far() -> None:
    numbers = [keyed_order(index, 10**15, b"a") for index in range(100)]
    assert len(set(numbers)) == 100
    assert min(numbers) < 10**14 and max(numbers) > 9 * 10**14
