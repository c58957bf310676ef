"""Big Bird: its plans, lengths that are no multiple of a block, and dense attention with its mask."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.token_mixers import BigBird
from tests.tolerances import TOLERANCE, relative_error

DIMS, HEADS, SIZE, RANDOM = 16, 2, 3, 2


def _mixer(**options: object) -> BigBird:
    mx.random.seed(0)
    sizes = {"block_size": SIZE, "num_random": RANDOM, "num_heads": HEADS}
    return BigBird(DIMS, **(sizes | options))


@pytest.mark.parametrize("count", [10, 11, 40])
def test_random_blocks_are_those_that_nothing_else_shows(count: int) -> None:
    blocks = _mixer().random_blocks(count)
    assert blocks.shape == (HEADS, count - 2, RANDOM)
    for head in blocks:
        for own, drawn in enumerate(head, start=1):
            seen = {0, count - 1, own - 1, own, own + 1}
            assert len({*drawn.tolist()} - seen) == RANDOM
    assert np.array_equal(blocks, _mixer().random_blocks(count))
    assert not np.array_equal(blocks, _mixer(seed=1).random_blocks(count))
    assert not np.array_equal(blocks[0], blocks[1])


def test_a_released_plan_is_drawn_in_training() -> None:
    mixer = _mixer(plan="released")
    assert np.array_equal(mixer.random_blocks(12), _mixer().random_blocks(12))
    mixer.eval()
    assert not mixer.random_blocks(12).any()
    drawn = _mixer()
    drawn.eval()
    assert drawn.random_blocks(12).any()


@pytest.mark.parametrize("length", [27, 28, 41, 60])
def test_equals_attention_with_a_dense_mask(length: int) -> None:
    mixer, count = _mixer(), -(-length // SIZE)
    x = mx.random.normal((2, length, DIMS))
    valid = mx.arange(length) < mx.array([length, length - 7])[:, None]
    y, state = mixer(x, None, valid)
    assert state == ()
    block = np.arange(length) // SIZE
    own, other = block[:, None], block
    seen = (
        (np.abs(own - other) <= 1) | np.isin(other, [0, count - 1]) | np.isin(own, [0, count - 1])
    )
    seen = np.broadcast_to(seen, (HEADS, length, length)).copy()
    if length <= (5 + 2 * RANDOM) * SIZE:
        seen[:] = True
    else:
        for head, plan in enumerate(mixer.random_blocks(count)):
            for n, drawn in enumerate(plan, start=1):
                seen[head, block == n] |= np.isin(block, drawn)
    for row, real in enumerate((length, length - 7)):
        q, k, v = (
            np.array(mixer[f"{name}_proj"](x[row]), np.float64).reshape(length, HEADS, -1)
            for name in ("query", "key", "value")
        )
        scores = np.einsum("thd,jhd->htj", q, k) / np.sqrt(DIMS // HEADS)
        weights = np.exp(np.where(seen & (np.arange(length) < real), scores, -np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        want = np.einsum("htj,jhd->thd", weights, v).reshape(length, DIMS)
        want = want @ np.array(mixer.output_proj.weight).T
        assert relative_error(y[row, :real], mx.array(want[:real])) <= TOLERANCE[mx.float32]
    gradient = mx.grad(lambda x: (mixer(x, None, valid)[0] ** 2).sum())(x)
    assert mx.isfinite(gradient).all().item()


def test_plans_that_are_refused() -> None:
    with pytest.raises(ValueError, match="'plan' must be a function or one of 'drawn', 'released'"):
        _mixer(plan="random")
    wrong = _mixer(plan=lambda count: np.full((HEADS, count - 2, RANDOM), count))
    with pytest.raises(ValueError, match="'plan' must return blocks from 0 to 12"):
        wrong(mx.zeros((1, 39, DIMS)))
