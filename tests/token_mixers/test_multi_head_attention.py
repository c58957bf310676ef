"""Attention to a second sequence: what is cached of it, padding, what is refused."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.layers.context import Context
from mlx_mmfree.models import Block
from mlx_mmfree.token_mixers import MemoryState, MultiHeadAttention
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]


class _CalledOnce(nn.Linear):
    """A linear layer that computes one time."""

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(x)
        self.weight = mx.full(self.weight.shape, float("nan"))
        return y


def test_a_memory_is_read_once() -> None:
    mx.random.seed(0)
    linears = {"query_proj": nn.Linear, "key_proj": _CalledOnce, "value_proj": _CalledOnce}
    mixer = MultiHeadAttention(16, num_heads=2, linear=linears | {"output_proj": nn.Linear})
    x, memory = mx.random.normal((2, 6, 16)), mx.random.normal((2, 5, 16))
    want, first = mixer(x, memory=memory)
    assert isinstance(first, MemoryState)
    for context in (Context(memory=memory), Context(memory=memory, by_position=True)):
        state, parts = first, []
        for n in range(6):
            part = x[:, n : n + 1]
            y, state = mixer(part, state, context=context)
            parts.append(y)
        assert relative_error(mx.concatenate(parts, axis=1), want) <= FLOAT32
    assert mixer.state_kind.rewound(first, 3) is first


def test_a_decoder_block_carries_both_states() -> None:
    mx.random.seed(1)
    own, other = (MultiHeadAttention(16, num_heads=2) for _ in range(2))
    block = Block(16, own, FeedForward(16), memory_mixer=other)
    x, memory = mx.random.normal((2, 6, 16)), mx.random.normal((2, 5, 16))
    valid = mx.array([[True] * 5, [False] * 2 + [True] * 3])
    context = Context(memory=memory, memory_valid=valid)
    want, _ = block(x, None, context)
    state, parts = block.init_state(2, mx.float32), []
    for part in mx.split(x, [1, 3], axis=1):
        y, state = block(part, state, Context(memory=memory, memory_valid=valid))
        parts.append(y)
    assert relative_error(mx.concatenate(parts, axis=1), want) <= FLOAT32
    assert state[0].used == 6 and state[1].keys.shape == (2, 2, 5, 8)


def test_a_memory_of_padding_alone_adds_nothing() -> None:
    mixer = MultiHeadAttention(16, num_heads=2)
    x, memory = mx.random.normal((2, 3, 16)), mx.random.normal((2, 4, 16))
    valid = mx.array([[False] * 4, [True] * 4])
    y, _ = mixer(x, memory=memory, memory_valid=valid)
    assert not y[0].any().item()
    assert relative_error(y[1], mixer(x[1:], memory=memory[1:])[0][0]) <= FLOAT32
    gradient = mx.grad(lambda m: (mixer(x, memory=m, memory_valid=valid)[0] ** 2).sum())(memory)
    assert mx.isfinite(gradient).all().item() and not gradient[0].any().item()


def test_padded_queries_give_zero() -> None:
    mixer = MultiHeadAttention(16, num_heads=2, bias=True)
    x = mx.random.normal((1, 3, 16))
    y, _ = mixer(x, None, mx.array([[True, False, True]]), memory=x)
    assert not y[0, 1].any().item() and y[0, 0].any().item()


@pytest.mark.parametrize("shape", [(2, 5, 10), (3, 5, 12), (5, 12), (2, 0, 12)])
def test_a_memory_that_does_not_fit(shape: tuple[int, ...]) -> None:
    mixer = MultiHeadAttention(16, num_heads=2, memory_dims=12)
    with pytest.raises(ValueError, match=r"'memory' must have shape \(2, M, 12\)"):
        mixer(mx.zeros((2, 3, 16)), memory=mx.zeros(shape))


def test_attention_to_a_memory_alone_needs_one() -> None:
    mixer = MultiHeadAttention(16, num_heads=2, memory_dims=12)
    with pytest.raises(ValueError, match="'memory' must be given"):
        mixer(mx.zeros((2, 3, 16)))


def test_a_memory_comes_with_the_first_call() -> None:
    mixer, x = MultiHeadAttention(16, num_heads=2), mx.zeros((1, 3, 16))
    with pytest.raises(ValueError, match="'memory' must come with the first call"):
        mixer(x, mixer(x)[1], memory=x)
