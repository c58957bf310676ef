"""Exponentials by way of SiLU against float64."""

import mlx.core as mx
import numpy as np

from mlx_mmfree.ops import relative_weights


def test_weights_are_in_proportion_to_exponentials() -> None:
    scores = np.concatenate([-np.logspace(-8, np.log10(80), 997), [0.0]]).astype(np.float32)
    got = np.array(relative_weights(mx.array(scores)), np.float64)
    np.testing.assert_allclose(got, np.exp(scores.astype(np.float64) - 1), rtol=1e-5)


def test_what_is_excluded_weighs_nothing() -> None:
    got = relative_weights(mx.array([-mx.inf, -500.0, 0.0]))
    assert got[0].item() == 0 and 0 < got[1].item() < 1e-30 < got[2].item()


def test_a_row_weighs_what_it_weighs_alone() -> None:
    rows = mx.minimum(mx.random.normal((3, 517), key=mx.random.key(1)), 0) * 9
    together = relative_weights(rows)
    for n in range(3):
        assert mx.array_equal(together[n], relative_weights(rows[n : n + 1])[0])
