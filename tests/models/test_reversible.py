"""Reversible blocks: gradients of stored activations, at a memory that the depth does not change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.norms import RMSNorm
from mlx_mmfree.models.parts.reversible import ReversibleBlock, ReversibleSequence
from mlx_mmfree.token_mixers import MLGRU, Reformer
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

DIMS = 32
Run = Callable[[ReversibleSequence, mx.array], mx.array]


def _sequence(depth: int) -> ReversibleSequence:
    mx.random.seed(2)
    linear = partial(BitLinear, norm_eps=1e-6, quantize_activations=False)
    return ReversibleSequence(
        [
            ReversibleBlock(
                DIMS,
                MLGRU(DIMS, linear=linear) if n % 2 else Reformer(DIMS, num_heads=2, chunk_size=64),
                FeedForward(DIMS, linear=linear),
            )
            for n in range(depth)
        ]
    )


def _stored(model: ReversibleSequence, x: mx.array, context: Context | None = None) -> mx.array:
    """The same with activations that are stored."""
    for block in model.blocks:
        x, _ = block(x, None, context)
    return x


def _gradients(model: ReversibleSequence, x: mx.array, run: Any) -> dict[str, mx.array]:
    def loss(given: dict[str, Any]) -> mx.array:
        model.update(given["model"])
        return mx.sin(run(given["x"])).sum()

    return dict(tree_flatten(mx.grad(loss)({"model": model.trainable_parameters(), "x": x})))


def test_gradients_are_those_of_stored_activations() -> None:
    model, x = _sequence(4), mx.random.normal((2, 20, 2 * DIMS), key=mx.random.key(1))
    valid = mx.arange(20) >= mx.array([[0], [3]])
    for context in (Context(), Context(valid)):
        stored = partial(_stored, model, context=context)
        assert relative_error(model(x, context), stored(x)) <= TOLERANCE[mx.float32]
        got = _gradients(model, x, partial(model, context=context))
        want = _gradients(model, x, stored)
        assert got.keys() == want.keys()
        for name in want:
            assert relative_error(got[name], want[name]) <= GRADIENT_TOLERANCE, name


def test_norms_are_of_the_specified_class() -> None:
    block = ReversibleBlock(DIMS, MLGRU(DIMS), FeedForward(DIMS), norm=RMSNorm, norm_eps=0.5)
    assert isinstance(block.token_norm, RMSNorm) and isinstance(block.channel_norm, RMSNorm)
    assert block.token_norm.eps == block.channel_norm.eps == 0.5


def test_a_call_with_states_equals_the_whole() -> None:
    model, x = _sequence(4), mx.random.normal((2, 9, 2 * DIMS), key=mx.random.key(1))
    states, parts = [block.init_state(2, x.dtype) for block in model.blocks], []
    for start in range(0, 9, 4):
        y = x[:, start : start + 4]
        for n, block in enumerate(model.blocks):
            y, states[n] = block(y, states[n])
        parts.append(y)
    assert relative_error(mx.concatenate(parts, axis=1), model(x)) <= TOLERANCE[mx.float32]


def _peak(depth: int, run: Run) -> int:
    """Bytes of training at the peak, without gradients of parameters."""
    model = _sequence(depth)
    x = mx.random.normal((2, 256, 2 * DIMS), key=mx.random.key(1))
    mx.eval(model, x)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = nn.value_and_grad(model, lambda model, x: run(model, x).square().mean())(model, x)
    mx.eval(found)
    own = sum(array.nbytes for _, array in tree_flatten(found[1]))
    return mx.get_peak_memory() - before - own


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_depth() -> None:
    run = ReversibleSequence.__call__
    assert _peak(16, run) <= 1.1 * _peak(4, run)
    # what it is compared with does grow
    assert _peak(16, _stored) >= 2 * _peak(4, _stored)
