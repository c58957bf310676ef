"""Blocks of which every second one sees a part of the tokens (ToSA, Singh et al., arXiv 2406.08816).

A transcription, since no code of the paper is public. It is trained in stages:

1. Train the blocks alone, `stage.is_selecting = False`, or load a published model.
2. Freeze them, and train the selectors by `selector_loss`: what they predict of a block's attention
   shall be what that block does.
3. Freeze the selectors, `stage.is_selecting = True`, and train the blocks on.
"""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from ...layers.arguments import check_sizes
from ...layers.attention.mixer import SelfAttention
from ...layers.projection import merge_heads, project, split_heads
from ...ops.activations import relu
from ...ops.long_sums import log_softmax, long_mean, long_sum
from .image_block import ImageBlock
from .stage import Stage


class TokenSelector(nn.Module):
    r"""From the scores of a layer, the weights of attention in the next one.

    .. math::
        P_{ij} = \mathrm{log\,softmax}_j\big(W_2\,\mathrm{relu}(W_1\,[q_{ih} \cdot k_{jh}]_h + b_1) + b_2
        \big), \quad
        w_j = \frac{1}{H} \sum_{h,i} \exp P_{hij}

    Args:
        num_heads: Heads `H`.
        hidden_dims: Rows of :math:`W_1`.

    Shape:
        `scores`: raw products `(B, H, L, L)`, neither scaled nor normed; the result: logarithms of
        weights, float32 `(B, H, L, L)`.

    Example:
        >>> TokenSelector(2, hidden_dims=4)(mx.zeros((1, 2, 3, 3))).shape
        (1, 2, 3, 3)
    """

    def __init__(self, num_heads: int, *, hidden_dims: int):
        super().__init__()
        check_sizes("TokenSelector", num_heads=num_heads, hidden_dims=hidden_dims)
        self.up_proj = nn.Linear(num_heads, hidden_dims)
        self.down_proj = nn.Linear(hidden_dims, num_heads)

    def __call__(self, scores: mx.array) -> mx.array:
        by_pair = mx.moveaxis(scores, 1, -1).astype(self.up_proj.weight.dtype)
        predicted = self.down_proj(relu(self.up_proj(by_pair)))
        return log_softmax(mx.moveaxis(predicted, -1, 1))

    @staticmethod
    def importance(log_weights: mx.array) -> mx.array:
        """How much all tokens look at each, `(B, L)`: the mean of heads of sums of weights."""
        return mx.mean(long_sum(mx.exp(log_weights), axis=-2), axis=1)


def chosen_first(importance: mx.array, count: int, prefix: int = 0) -> tuple[mx.array, mx.array]:
    """The places of the `count` most important tokens, and of the others, each in their order.

    Args:
        importance: `(B, L)`.
        count: How many are chosen. Of equal ones, the earlier come first.
        prefix: How many tokens at the beginning are chosen in any case, as a class token is.
    """
    place = mx.arange(importance.shape[1])
    # places have no gradient
    ranks = mx.where(place < prefix, -mx.inf, -mx.stop_gradient(importance))
    ranked = mx.argsort(ranks, axis=1)
    return mx.sort(ranked[:, :count], axis=1), mx.sort(ranked[:, count:], axis=1)


class SelectingStage(Stage):
    r"""Pairs of blocks: of the tokens that the first gives, the second changes the important ones.

    .. math::
        y = \mathrm{block}_1(x), \quad z_S = \mathrm{block}_2(y_S), \quad z_j = y_j \;(j \notin S)

    with the tokens `S` that a `TokenSelector` finds important by the scores of the first block. A last
    block without a partner sees all.

    Args:
        blocks: Blocks with bidirectional softmax attention, and neither positions nor norms inside it.
        keep: The share of tokens that a second block sees.
        hidden_dims: Width of the selectors.
        prefix: Tokens at the beginning that every block sees.

    Attributes:
        is_selecting: Whether tokens are left out; otherwise this is a plain `Stage`.

    Shape:
        `x` and `y`: `(B, L, D)`.
    """

    def __init__(
        self, blocks: Sequence[ImageBlock], *, keep: float, hidden_dims: int, prefix: int = 0
    ):
        super().__init__(blocks)
        self.selectors = [
            TokenSelector(block.mixer.num_heads, hidden_dims=hidden_dims)
            for block in blocks[: len(blocks) // 2 * 2 : 2]
        ]
        self.is_selecting = True
        self._keep = keep
        self._prefix = prefix

    def until_last(self, x: mx.array) -> mx.array:
        """What enters the last pair, or the last block if that has no partner."""
        if not self.is_selecting:
            return super().until_last(x)
        whole = len(self._pairs) - (len(self.blocks) + 1) % 2
        return self._through_pairs(x, slice(whole))

    def from_last(self, x: mx.array) -> mx.array:
        if not self.is_selecting:
            return super().from_last(x)
        if len(self.blocks) % 2:
            y: mx.array = self.blocks[-1](x)
            return y
        return self._through_pairs(x, slice(-1, None))

    def selector_loss(self, x: mx.array) -> mx.array:
        r"""How far the selectors are from the attention of the second blocks, which see all tokens.

        .. math::
            \frac{1}{N B H L} \sum_{n,b,h,i}
            \mathrm{KL}\big(A^{(2n)}_{bhi} \,\|\, \exp P^{(n)}_{bhi}\big)
        """
        losses = []
        for selector, (first, second) in zip(self.selectors, self._pairs, strict=True):
            x, scores = with_scores(first, x)
            predicted = selector(mx.stop_gradient(scores))
            x, scores = with_scores(second, x)
            true = mx.stop_gradient(log_softmax(scores * second.mixer.head_dim**-0.5))
            losses.append(long_mean(long_sum(mx.exp(true) * (true - predicted), axis=-1)))
        return mx.mean(mx.stack(losses))

    def kept_count(self, length: int) -> int:
        """How many of so many tokens a second block sees."""
        return max(self._prefix + 1, min(length, round(self._keep * length)))

    @property
    def _pairs(self) -> list[tuple[ImageBlock, ImageBlock]]:
        blocks = cast("list[ImageBlock]", self.blocks)
        return list(zip(blocks[:-1:2], blocks[1::2], strict=True))

    def _through_pairs(self, x: mx.array, which: slice) -> mx.array:
        pairs = list(zip(self.selectors, self._pairs, strict=True))
        for selector, (first, second) in pairs[which]:
            x, scores = with_scores(first, x)
            x = self._selected(second, x, selector.importance(selector(scores)))
        return x

    def _selected(self, block: ImageBlock, x: mx.array, importance: mx.array) -> mx.array:
        length = x.shape[1]
        count = self.kept_count(length)
        if count == length:
            return block(x)
        chosen, others = chosen_first(importance, count, self._prefix)
        parts = [mx.take_along_axis(x, places[..., None], axis=1) for places in (chosen, others)]
        joined = mx.concatenate([block(parts[0]), parts[1]], axis=1)
        back = mx.argsort(mx.concatenate([chosen, others], axis=1), axis=1)
        return mx.take_along_axis(joined, back[..., None], axis=1)


def with_scores(block: ImageBlock, x: mx.array) -> tuple[mx.array, mx.array]:
    """What a block with softmax attention gives, and the products of its queries and keys, float32."""
    mixer: SelfAttention = block.mixer
    projected = mixer.project_inner(block.mixer_norm(x), None)
    q, k, v = (split_heads(part, mixer.num_heads) for part in mx.split(projected, 3, axis=-1))
    scores = q.astype(mx.float32) @ k.astype(mx.float32).swapaxes(-1, -2)
    weights = mx.exp(log_softmax(scores * mixer.head_dim**-0.5))
    y = merge_heads(weights @ v.astype(mx.float32)).astype(x.dtype)
    return block.completed(x, project(y, (mixer.output_proj,))), scores
