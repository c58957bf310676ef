"""Mixers of linear cost build graphs of linear work, and decode for the same at any position.

What is counted are the arrays that a graph computes and their bytes, so that no clock is asked.
"""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.models.parts.mixers import token_mixers
from mlx_mmfree.ops.backend.graph import graph_of
from mlx_mmfree.token_mixers import (
    GRU,
    AttentionSink,
    BigBird,
    Hydra,
    LocalAttention,
    Longformer,
    MultiHeadAttention,
    Reformer,
    ReLUAttention,
    SimA,
    SlidingWindowAttention,
)
from tests.graph import VIEWS, launches

DIMS, SHORT, LONG = 16, 1024, 8192
HEADS = {"num_heads": 2}
NEAR, FAR = 100, 10_000


def _recurrent() -> dict[str, TokenMixer]:
    found = {}
    for name, kind in token_mixers().items():
        if kind.recurrent and kind is not GRU:
            options = {"max_length": 2 * FAR} if kind.length_bound else {}
            found[name] = kind(DIMS, **options)
    return found


RECURRENT = _recurrent()
WINDOWS: dict[str, TokenMixer] = {
    "window": SlidingWindowAttention(DIMS, window=16, **HEADS),
    "sinks": AttentionSink(DIMS, window=16, **HEADS),
    "blocks": LocalAttention(DIMS, block_size=16, **HEADS),
}
OTHERS: dict[str, TokenMixer] = {
    "Hydra on both sides": Hydra(DIMS, is_causal=False),
    "SimA": SimA(DIMS, **HEADS),
    "window on both sides": SlidingWindowAttention(DIMS, window=16, is_causal=False, **HEADS),
    "Longformer": Longformer(DIMS, window=16, **HEADS),
    "Big Bird": BigBird(DIMS, block_size=8, **HEADS),
    "Reformer": Reformer(DIMS, **HEADS),
}
LINEAR = RECURRENT | WINDOWS | OTHERS


def _bytes(mixer: TokenMixer, length: int, is_trained: bool) -> int:
    """The bytes of all arrays that a pass computes."""
    x = mx.random.normal((1, length, DIMS))
    mx.eval(x, mixer.parameters())
    y = mx.grad(lambda x: (mixer(x)[0] ** 2).sum())(x) if is_trained else mixer(x)[0]
    graph = graph_of([y], [x])
    indices = [index for node in graph.nodes if node.name not in VIEWS for index in node.outputs]
    return sum(graph.arrays[index].nbytes for index in indices)


@pytest.mark.sample(1, of="name")
@pytest.mark.parametrize("is_trained", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", LINEAR)
def test_work_grows_with_the_length(name: str, is_trained: bool) -> None:
    short, long = (_bytes(LINEAR[name], length, is_trained) for length in (SHORT, LONG))
    # half as much again leaves space for a logarithm, where the square would be eight times as much
    assert long < 1.5 * LONG / SHORT * short


def test_the_steps_of_a_gru_do_too() -> None:
    mixer = GRU(DIMS)
    short, long = (_bytes(mixer, length, True) for length in (32, 256))
    assert long < 1.5 * 8 * short


def test_the_measure_tells_squares() -> None:
    mixer = ReLUAttention(DIMS, **HEADS)
    assert _bytes(mixer, LONG, False) > 3 * LONG / SHORT * _bytes(mixer, SHORT, False)


def _decoding(mixer: TokenMixer, position: int) -> tuple[object, object]:
    """The operations of a step after so many tokens, and the formats of the arrays that it reads."""
    chunk = mx.random.normal((1, 1000, DIMS))
    state = mixer.init_state(1, chunk.dtype)
    for start in range(0, position, 1000):
        state = mixer(chunk[:, : min(1000, position - start)], state)[1]
        mx.eval(state)
    formats = [(name, array.shape, array.dtype) for name, array in tree_flatten(state)]
    return launches(mixer(chunk[:, :1], state)), formats


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RECURRENT | WINDOWS)
def test_a_token_costs_the_same_at_any_position(name: str) -> None:
    mixer = (RECURRENT | WINDOWS)[name]
    assert _decoding(mixer, FAR) == _decoding(mixer, NEAR)


def test_the_measure_tells_states_that_grow() -> None:
    mixer = MultiHeadAttention(DIMS, **HEADS)
    assert _decoding(mixer, 2000) != _decoding(mixer, NEAR)
