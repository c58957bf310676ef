"""Predicts which tokens the next layer needs (ToSA, Singh et al., arXiv 2406.08816).

No code of the paper is public. This is a transcription, with a reading of what it leaves open: the
convolutions have a width of 1 and the heads as channels, and heads count alike.
"""

import mlx.core as mx
import mlx.nn as nn

from ...ops.activations import relu
from ...ops.long_sums import log_softmax, long_sum
from ..arguments import check_sizes


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
