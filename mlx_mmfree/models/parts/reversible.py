"""Reversible blocks, whose inputs are computed from their outputs in the backward pass."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ...layers import ChannelMixer
from ...layers.arguments import check_features
from ...layers.context import Context
from ...layers.mixer import State, TokenMixer
from .block import Block, Branch, NormOrder


class ReversibleBlock(Block):
    r"""Two streams, of which each gets a mixer of the other (Reformer, arXiv 2001.04451).

    .. math::
        y_1 = x_1 + \mathrm{TokenMixer}(\mathrm{norm}(x_2)), \quad
        y_2 = x_2 + \mathrm{ChannelMixer}(\mathrm{norm}(y_1))

    Its inputs follow from its outputs, by subtraction in the reverse order (Gomez et al., arXiv
    1707.04585).

    Args:
        dims: Dims `D` of each stream.
        token_mixer: Mixes along the sequence.
        channel_mixer: Mixes within a position.
        norm: Makes a norm, called as `norm(dims, eps=...)`; `None`: there are none.
        norm_eps: Epsilon of the norms.

    Shape:
        `x` and `y`: both streams side by side, `(B, L, 2 D)`.

    State:
        That of the token mixer.
    """

    drops = False

    def __init__(
        self,
        dims: int,
        token_mixer: TokenMixer,
        channel_mixer: ChannelMixer,
        *,
        norm: Callable[..., nn.Module] | None = nn.LayerNorm,
        norm_eps: float = 1e-6,
    ):
        order: NormOrder = "none" if norm is None else "pre"
        make = nn.LayerNorm if norm is None else norm
        super().__init__(
            dims, token_mixer, channel_mixer, norm=make, norm_eps=norm_eps, norm_order=order
        )
        self._dims = dims
        self._order = "reversible"

    def __call__(
        self, x: mx.array, state: State = None, context: Context | None = None, **arguments: Any
    ) -> tuple[mx.array, State]:
        check_features("ReversibleBlock", x, 2 * self._dims)
        context = Context() if context is None else context
        first, second = mx.split(x, 2, axis=-1)
        first, state = self.add("token", first, second, state, context, **arguments)
        second, _ = self.add("channel", second, first, None, context)
        return mx.concatenate([first, second], axis=-1), state

    def mixing_weights(
        self, x: mx.array, state: State, context: Context, **arguments: Any
    ) -> dict[str, Callable[[], mx.array]]:
        return super().mixing_weights(mx.split(x, 2, axis=-1)[1], state, context, **arguments)

    def of_tokens(self, context: Context, x: mx.array) -> mx.array:
        """The share of the second stream that is added to the first, of whole sequences."""
        return self.branch("token", x, None, context)[0]

    def of_channels(self, x: mx.array) -> mx.array:
        """The share of the first stream that is added to the second."""
        return self.branch("channel", x, None, Context())[0]


def two_streams(x: mx.array) -> mx.array:
    """Both streams before the first block, each the residual stream `(B, L, D)`."""
    return mx.concatenate([x, x], axis=-1)


def one_stream(x: mx.array) -> mx.array:
    """The residual stream after the last block: the mean of both, `(B, L, D)`."""
    first, second = mx.split(x, 2, axis=-1)
    return (first + second) / 2


class ReversibleSequence(nn.Module):
    """Reversible blocks over whole sequences, whose backward pass undoes them one by one.

    Of all activations only the last ones are stored: the memory of training does not grow with the
    number of blocks but for their parameters and gradients. The backward pass computes each mixer once
    more. What it undoes is rounded anew in each block, so that its gradients differ a little from the
    gradients with stored activations; streams in 16 bits are not exact enough. Mixers must give the same
    twice: dropout does not.

    Args:
        blocks: The blocks, first to last.

    Shape:
        `x` and `y`: both streams side by side, `(B, L, 2 D)`.
    """

    def __init__(self, blocks: Sequence[ReversibleBlock]):
        super().__init__()
        self.blocks = list(blocks)

    def __call__(self, x: mx.array, context: Context | None = None) -> mx.array:
        context = Context() if context is None else context
        blocks = self.blocks
        parameters = [block.trainable_parameters() for block in blocks]

        def forward(parameters: list[dict[str, Any]], x: mx.array) -> mx.array:
            for block, own in zip(blocks, parameters, strict=True):
                block.update(own)
                x = block(x, None, context)[0]
            return x

        def backward(primals: Any, gradient: mx.array, y: mx.array) -> Any:
            found: list[Any] = [None] * len(blocks)
            for n in reversed(range(len(blocks))):
                y, gradient, found[n] = _undone(blocks[n], primals[0][n], y, gradient, context)
            return found, gradient

        reversible: Any = mx.custom_function(forward)
        reversible.vjp(backward)
        result: mx.array = reversible(parameters, x)
        if context.cross_layer:
            raise ValueError(
                "[ReversibleSequence] 'blocks' must hand nothing to later ones, since a backward pass "
                f"that undoes them cannot follow it, but they pass on {', '.join(context.cross_layer)}."
            )
        for block, own in zip(blocks, parameters, strict=True):
            block.update(own)
        return result


def _undone(
    block: ReversibleBlock, parameters: Any, y: mx.array, gradient: mx.array, context: Context
) -> tuple[mx.array, mx.array, Any]:
    """The input of a block, its gradient and the parameters', from its output and gradient."""
    first, second = mx.split(y, 2, axis=-1)
    of_first, of_second = mx.split(gradient, 2, axis=-1)

    def mixer(branch: Branch) -> Callable[[Any, mx.array], mx.array]:
        def call(parameters: Any, x: mx.array) -> mx.array:
            block.update(parameters)
            return branch(x)

        return call

    mixed, own, of_input = _vjp(mixer(block.of_channels), parameters, first, of_second)
    second, of_first = second - mixed, of_first + of_input
    mixed, others, of_input = _vjp(
        mixer(partial(block.of_tokens, context)), parameters, second, of_first
    )
    first, of_second = first - mixed, of_second + of_input
    parts = [first, second, of_first, of_second]
    gradients = [a + b for a, b in zip(own, others, strict=True)]
    # the block before waits until all gradients of this one are there, and nothing else of it is kept
    parts = mx.depends(parts, [*parts, *gradients])
    return (
        mx.concatenate(parts[:2], axis=-1),
        mx.concatenate(parts[2:], axis=-1),
        _unflatten(parameters, gradients),
    )


def _vjp(
    call: Callable[[Any, mx.array], mx.array], parameters: Any, x: mx.array, gradient: mx.array
) -> tuple[mx.array, list[mx.array], mx.array]:
    """The result of a mixer, and the gradients of the parameters and of its input."""

    def flat(*arrays: mx.array) -> list[mx.array]:
        return [call(_unflatten(parameters, arrays[:-1]), arrays[-1])]

    leaves = [array for _, array in cast(Any, tree_flatten(parameters))]
    # computed only when the gradient is known, so that nothing is kept until then
    *leaves, x = mx.depends([*leaves, x], [gradient])
    outputs, gradients = mx.vjp(flat, [*leaves, x], [gradient])
    return outputs[0], list(gradients[:-1]), gradients[-1]


def _unflatten(tree: Any, arrays: Sequence[mx.array]) -> Any:
    """Puts arrays into the structure of a tree."""
    following = iter(arrays)
    return tree_map(lambda _: next(following), tree)
