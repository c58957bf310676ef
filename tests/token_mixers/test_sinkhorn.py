"""Sinkhorn attention: padding between blocks, noise, what is refused."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.token_mixers import Sinkhorn
from mlx_mmfree.token_mixers.sinkhorn import sinkhorn
from tests.tolerances import TOLERANCE, relative_error

SMALL = {"block_size": 4, "num_heads": 2}


@pytest.mark.parametrize("length", [1, 4, 13, 63])
@pytest.mark.parametrize("before", [0, 3])
def test_padding_does_not_move_blocks(length: int, before: int) -> None:
    mixer = Sinkhorn(16, is_causal=False, **SMALL)
    x = mx.random.normal((2, length, 16), key=mx.random.key(1))
    padded = mx.pad(x, [(0, 0), (before, 9), (0, 0)], constant_values=7.0)
    position = mx.arange(padded.shape[1])
    valid = mx.broadcast_to((position >= before) & (position < before + length), padded.shape[:2])
    y, _ = mixer(padded, None, valid)
    assert relative_error(y[:, before : before + length], mixer(x)[0]) <= TOLERANCE[mx.float32]


def test_padding_alone_has_gradients() -> None:
    mixer = Sinkhorn(16, is_causal=False, **SMALL)
    x, valid = mx.ones((2, 9, 16)), mx.array([[True] * 6 + [False] * 3, [False] * 9])
    gradient = mx.grad(lambda x: mixer(x, None, valid)[0].square().sum())(x)
    assert mx.isfinite(gradient).all().item()


def test_every_block_sees_every_block() -> None:
    mixer = Sinkhorn(16, is_causal=False, **SMALL)
    x = mx.random.normal((1, 16, 16), key=mx.random.key(1))
    changed = mx.concatenate([x[:, :-1], x[:, -1:] + 1], axis=1)
    assert not mx.array_equal(mixer(x)[0][:, 0], mixer(changed)[0][:, 0])


def test_rows_and_columns_sum_to_one() -> None:
    shares = np.array(sinkhorn(mx.random.normal((3, 5, 5), key=mx.random.key(1)), 30))
    np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-4)
    np.testing.assert_allclose(shares.sum(axis=-2), 1, rtol=1e-6)


def test_noise_belongs_to_training() -> None:
    mixer = Sinkhorn(16, is_causal=False, has_noise=True, **SMALL)
    x = mx.random.normal((1, 16, 16), key=mx.random.key(1))
    assert not mx.array_equal(mixer(x)[0], mixer(x)[0])
    mixer.eval()
    assert mx.array_equal(mixer(x)[0], mixer(x)[0])


def test_a_temperature_is_positive() -> None:
    with pytest.raises(ValueError, match=r"\[Sinkhorn\] 'temperature' must be positive"):
        Sinkhorn(16, temperature=0.0)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_few_tokens_and_many_see_the_same(num_heads: int) -> None:
    mixer = Sinkhorn(16, block_size=4, num_heads=num_heads)
    x = mx.random.normal((2, 50, 16), key=mx.random.key(1))
    whole, _ = mixer(x)
    for chunk in (1, 7, 30):
        _, state = mixer(x[:, :17])
        y, _ = mixer(x[:, 17 : 17 + chunk], state)
        assert relative_error(y, whole[:, 17 : 17 + chunk]) <= TOLERANCE[mx.float32]
