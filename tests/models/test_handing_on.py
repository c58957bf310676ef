"""A channel mixer with a state and values across layers, as RWKV-7 needs them."""

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers import ChannelMixer
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.models import Block, Decoder
from mlx_mmfree.models.parts.reversible import ReversibleBlock, ReversibleSequence
from mlx_mmfree.ops import linear_scan
from mlx_mmfree.training.optimizer_step import checkpoint_blocks
from tests.tolerances import TOLERANCE, relative_error

DIMS = 8
TOKENS = mx.array([[1, 5, 2, 7, 3], [4, 4, 0, 6, 9]])


class ShiftedSquare(TokenMixer):
    """The square of a projection of each position and the one before it, in place of a channel mixer."""

    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.before_proj, self.here_proj = (nn.Linear(DIMS, DIMS, bias=False) for _ in range(2))

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> mx.array:
        return mx.zeros((batch_size, 1, DIMS), dtype)

    def mix(self, x: mx.array, state: mx.array, context: Context) -> tuple[mx.array, mx.array]:
        rows = mx.concatenate([state, x], axis=1)
        y = self.before_proj(rows[:, :-1]) + self.here_proj(x)
        return y * y, rows[:, -1:]


class ValueOfTheFirst(TokenMixer):
    """A decaying sum of values, each half the layer's own and half the first layer's."""

    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.value_proj = nn.Linear(DIMS, DIMS, bias=False)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> mx.array:
        return mx.zeros((batch_size, DIMS))

    def mix(self, x: mx.array, state: mx.array, context: Context) -> tuple[mx.array, mx.array]:
        value = self.value_proj(x)
        first = context.cross_layer.setdefault("first value", value)
        mean = (value + first) / 2
        return linear_scan(mx.full(mean.shape, 0.5), mean, state)


def _model(channel: Any = ShiftedSquare) -> Decoder:
    mx.random.seed(5)
    blocks = [Block(DIMS, ValueOfTheFirst(), channel()) for _ in range(3)]
    return Decoder(nn.Embedding(10, DIMS), blocks, nn.RMSNorm(DIMS))


def _assert_close(got: object, want: object) -> None:
    for (_, a), (_, b) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert relative_error(a, b) <= TOLERANCE[mx.float32]


def test_the_formula() -> None:
    model, x, first = _model(), None, None
    x = model.embed(TOKENS)
    for block in model.blocks:
        value = block.token_mixer.value_proj(block.token_norm(x))
        first = value if first is None else first
        total = mx.zeros((2, DIMS))
        sums = []
        for n in range(TOKENS.shape[1]):
            total = 0.5 * total + (value[:, n] + first[:, n]) / 2
            sums.append(total)
        x = x + mx.stack(sums, axis=1)
        normed, mixer = block.channel_norm(x), block.channel_mixer
        before = mx.pad(normed[:, :-1], [(0, 0), (1, 0), (0, 0)])
        x = x + (mixer.before_proj(before) + mixer.here_proj(normed)).square()
    _assert_close(model(TOKENS)[0], model.logits(model.norm(x)))


def test_a_text_goes_on_from_a_state() -> None:
    model = _model()
    want, last = model(TOKENS)
    assert len(last) == len(model.token_mixers) == 6
    assert [state.shape for state in last[:2]] == [(2, DIMS), (2, 1, DIMS)]
    for cuts in ([2], [1, 2, 3, 4]):
        state, parts = model.init_state(2), []
        for chunk in mx.split(TOKENS, cuts, axis=1):
            logits, state = model(chunk, state)
            parts.append(logits)
        _assert_close(mx.concatenate(parts, axis=1), want)
        _assert_close(state, last)


def test_tokens_can_be_taken_back() -> None:
    model = _model()
    _, state = model(TOKENS[:1, :1])
    hidden, after = model.hidden(TOKENS[:1, 1:4], state, by_position=True)
    want, _ = model.hidden(TOKENS[:1, 1:4], state)
    _assert_close(hidden, want)
    for count in (1, 2):
        states = tuple(each.states[count - 1] for each in after)
        _, shorter = model(TOKENS[:1, 1 : 1 + count], state)
        _assert_close(states, shorter)


def test_gradients_do_not_depend_on_recomputing() -> None:
    def gradients(model: Decoder) -> Any:
        def loss(model: Decoder) -> mx.array:
            return model(TOKENS)[0].square().sum()

        return nn.value_and_grad(model, loss)(model)

    recomputing = _model()
    checkpoint_blocks(recomputing)
    _assert_close(gradients(recomputing), gradients(_model()))


class _Square(ChannelMixer):
    def mix(self, x: mx.array) -> mx.array:
        return x * x


def test_what_undoes_its_blocks_refuses_a_value_that_is_passed_on() -> None:
    blocks = [ReversibleBlock(DIMS, ValueOfTheFirst(), _Square()) for _ in range(2)]
    with pytest.raises(ValueError, match=r"must hand nothing to later ones.*first value"):
        ReversibleSequence(blocks)(mx.ones((1, 3, 2 * DIMS)))
