"""Values of the first layer of RWKV-7 reach later ones, by whatever way a text is read."""

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import StatesByPosition
from mlx_mmfree.models import Block
from mlx_mmfree.token_mixers import RWKV7, RWKV7Channel
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]


def two_blocks() -> list[Block]:
    mx.random.seed(2)
    return [
        Block(32, RWKV7(32, mixes_values=n > 0, value_rank=3), RWKV7Channel(32, hidden_dims=48))
        for n in range(2)
    ]


def read(blocks: list[Block], x: mx.array, states: list, **arguments) -> tuple[mx.array, list]:
    context, after = Context(**arguments), []
    for block, state in zip(blocks, states, strict=True):
        x, state = block(x, state, context)
        after.append(state)
    return x, after


def test_a_later_layer_reads_the_values_of_the_first() -> None:
    blocks, x = two_blocks(), mx.random.normal((2, 7, 32))
    first = blocks[0].token_mixer
    first.value_shift = mx.zeros((1, 1, 32))
    y, _ = read(blocks, x, [None, None])
    inner, cross_layer = blocks[0].token_norm(x), Context()
    first(inner, context=cross_layer)
    assert (
        relative_error(cross_layer.cross_layer["first_value"], first.value_proj(inner)) <= FLOAT32
    )
    first.value_proj.weight = 2 * first.value_proj.weight
    assert relative_error(read(blocks, x, [None, None])[0], y) > 1e-2


def test_chunks_and_positions_give_the_same() -> None:
    blocks, x = two_blocks(), mx.random.normal((2, 7, 32))
    whole, last = read(blocks, x, [None, None])
    first, states = read(blocks, x[:, :3], [None, None])
    second, states = read(blocks, x[:, 3:], states)
    assert relative_error(mx.concatenate([first, second], axis=1), whole) <= FLOAT32
    for (_, got), (_, want) in zip(tree_flatten(states), tree_flatten(last), strict=True):
        assert relative_error(got, want) <= FLOAT32
    alone, after = read(blocks, x, [None, None], by_position=True)
    assert relative_error(alone, whole) <= FLOAT32
    assert isinstance(after[1][0], StatesByPosition) and len(after[1][0].states) == 7


def test_gradients_reach_what_mixes_values() -> None:
    blocks, x = two_blocks(), mx.random.normal((2, 7, 32))
    later = blocks[1].token_mixer

    def loss(parameters: dict) -> mx.array:
        later.update(parameters)
        return (read(blocks, x, [None, None])[0] ** 2).sum()

    for name, gradient in tree_flatten(mx.grad(loss)(later.trainable_parameters())):
        assert mx.abs(gradient).max().item() > 0, name
