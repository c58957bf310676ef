"""A block against its formula, with its norms at every position."""

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.layers import ChannelMixer
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.models import Block, set_dropout
from tests.tolerances import TOLERANCE, relative_error

X = mx.random.normal((2, 5, 8), key=mx.random.key(0))
MEMORY = mx.random.normal((2, 3, 8), key=mx.random.key(1))


class RunningSum(TokenMixer):
    """The sum of all inputs so far, times 3."""

    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> mx.array:
        return mx.zeros((batch_size, 1, 8), dtype)

    def mix(self, x: mx.array, state: mx.array, context: Context) -> tuple[mx.array, mx.array]:
        y = mx.cumsum(x, axis=1) + state
        return 3 * y, y[:, -1:]


class PlusMemory(TokenMixer):
    """Each input plus the sum of the second sequence; without one, minus the input."""

    causal: ClassVar[bool] = True
    cross: ClassVar[bool] = True

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def mix(self, x: mx.array, state: Any, context: Context) -> tuple[mx.array, tuple[()]]:
        memory = context.memory
        return (-x if memory is None else x + memory.sum(axis=1, keepdims=True)), ()


class Square(ChannelMixer):
    def mix(self, x: mx.array) -> mx.array:
        return x * x


def _layer_norm(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)


def _expected(x: np.ndarray, order: str, mixers: list[Any]) -> np.ndarray:
    first = x
    for mix in mixers:
        if order in ("pre", "parallel"):
            x = x + mix(_layer_norm(x if order == "pre" else first))
        elif order == "branch":
            x = x + _layer_norm(mix(x))
        elif order == "sandwich":
            x = x + _layer_norm(mix(_layer_norm(x)))
        else:
            x = x + mix(x)
            x = _layer_norm(x) if order == "post" else x
    return x


ORDERS = ["pre", "post", "branch", "sandwich", "parallel", "none"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("has_memory", [False, True])
def test_formula(order: Any, has_memory: bool) -> None:
    memory = np.array(MEMORY, np.float64).sum(axis=1, keepdims=True)
    mixers = [lambda x: 3 * np.cumsum(x, axis=1), lambda x: x + memory, lambda x: x * x]
    want = _expected(np.array(X, np.float64), order, mixers if has_memory else mixers[::2])
    block = Block(
        *(8, RunningSum(), Square()),
        memory_mixer=PlusMemory() if has_memory else None,
        norm=nn.LayerNorm,
        norm_eps=1e-3,
        norm_order=order,
    )
    y, _ = block(X, None, Context(memory=MEMORY))
    assert relative_error(y, mx.array(want)) <= TOLERANCE[mx.float32]
    state, parts = block.init_state(2, mx.float32), []
    for part in mx.split(X, [1, 3], axis=1):
        part, state = block(part, state, Context(memory=MEMORY))
        parts.append(part)
    assert relative_error(mx.concatenate(parts, axis=1), mx.array(want)) <= TOLERANCE[mx.float32]


def test_beside_a_memory_mixer_the_token_mixer_sees_its_own_sequence_alone() -> None:
    alone = Block(8, PlusMemory(), Square(), norm_order="none")
    beside = Block(8, PlusMemory(), Square(), memory_mixer=PlusMemory(), norm_order="none")
    assert not mx.array_equal(alone(X, None, Context(memory=MEMORY))[0], alone(X)[0])
    # x - x, then what the memory adds
    added = mx.broadcast_to(MEMORY.sum(axis=1, keepdims=True), X.shape)
    assert mx.allclose(beside(X, None, Context(memory=MEMORY))[0], added + added * added)


def test_impossible_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="'norm_order' must be one of 'pre', 'post', 'branch'"):
        Block(8, RunningSum(), Square(), norm_order="before")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="'memory_mixer' must take a second sequence but got a Run"
    ):
        Block(8, RunningSum(), Square(), memory_mixer=RunningSum())


class Zero(ChannelMixer):
    def mix(self, x: mx.array) -> mx.array:
        return mx.zeros_like(x)


class Nothing(RunningSum):
    def mix(self, x: mx.array, state: mx.array, context: Context) -> tuple[mx.array, mx.array]:
        return mx.zeros_like(x), x[:, -1:]


@pytest.mark.parametrize("norm_order", ORDERS)
@pytest.mark.parametrize("mixers", [(RunningSum, Zero), (Nothing, Square)])
def test_dropout_takes_elements_of_what_a_mixer_adds(norm_order: Any, mixers: Any) -> None:
    x = mx.random.normal((64, 5, 8), key=mx.random.key(2))
    token_mixer, channel_mixer = mixers

    def unchanged(dims: int, eps: float) -> nn.Module:
        return nn.Identity()

    block = Block(8, token_mixer(), channel_mixer(), norm=unchanged, norm_order=norm_order)
    added = np.array(block(x)[0] - x)
    assert set_dropout(block, 0.25) == 1
    block.train()
    mx.random.seed(3)
    first, second = (np.array(block(x)[0] - x) for _ in range(2))
    is_there = np.abs(first) > 1e-6
    # 2,560 elements, of which a quarter goes: six standard deviations are 0.05
    assert abs(is_there.mean() - 0.75) < 0.05
    np.testing.assert_allclose(first[is_there], added[is_there] / 0.75, rtol=1e-4, atol=1e-5)
    assert (is_there != (np.abs(second) > 1e-6)).any()
    block.eval()
    assert np.array_equal(np.array(block(x)[0] - x), added)
    block.train()
    set_dropout(block, 0.0)
    assert np.array_equal(np.array(block(x)[0] - x), added)


@pytest.mark.parametrize("probability", [-0.1, 1, float("nan")])
def test_a_probability_of_dropout_is_below_one(probability: float) -> None:
    with pytest.raises(ValueError, match="'probability' must be at least 0 and below 1"):
        set_dropout(Block(8, RunningSum(), Square()), probability)
