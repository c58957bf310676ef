"""Performer attention, FAVOR+ (Choromanski et al., arXiv 2009.14794)."""

import math
from typing import Any, ClassVar, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from ..layers import recurrence
from ..layers.arguments import check_optional_sizes, check_sequences, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, TokenMixer
from ..ops import gated_linear_attention
from ..ops.activations import relu

NO_MAXIMUM = -1e30
"""The largest exponent before there is one."""


def orthogonal_projection(features: int, dims: int, key: mx.array | None = None) -> mx.array:
    """Gaussian directions, of which each `dims` ones are orthogonal, float32 `(features, dims)`.

    Args:
        features: Number of directions.
        dims: Their size.
        key: Source of randomness; `None`: MLX's global one.
    """
    blocks = -(-features // dims)
    drawn = np.array(mx.random.normal((blocks + 1, dims, max(dims, features)), key=key), np.float64)
    directions, triangle = np.linalg.qr(drawn[:blocks, :, :dims])
    # with these signs each direction is as likely as any other
    directions = directions * np.sign(np.diagonal(triangle, axis1=-2, axis2=-1))[:, None]
    rows = directions.swapaxes(-1, -2).reshape(-1, dims)[:features]
    lengths = np.linalg.norm(drawn[blocks, :, :features], axis=0)
    return mx.array((rows * lengths[:, None]).astype(np.float32))


def exponents(x: mx.array, projection: mx.array) -> tuple[mx.array, mx.array]:
    r"""The two exponents of a feature, :math:`W \tilde x` and :math:`\lVert\tilde x\rVert^2 / 2`.

    Args:
        x: `(..., K)`, of which :math:`\tilde x = x / K^{1/4}`.
        projection: `W`, `(F, K)`.

    Returns:
        float32 `(..., F)` and `(..., 1)`.
    """
    x = x.astype(mx.float32) * x.shape[-1] ** -0.25
    return x @ projection.astype(mx.float32).T, x.square().sum(axis=-1, keepdims=True) / 2


def softmax_features(
    projected: mx.array, half: mx.array, maximum: mx.array, eps: float
) -> mx.array:
    r"""Features whose products stand for :math:`\exp(q \cdot k / \sqrt K)`, `(..., F)`.

    .. math::
        \phi = F^{-1/2}\big(\exp(W \tilde x - \lVert\tilde x\rVert^2 / 2 - c) + \epsilon\big)

    Args:
        projected: The first of `exponents`.
        half: The second.
        maximum: `c`, at least the largest of the first. It cancels but for :math:`\epsilon`.
        eps: :math:`\epsilon`.
    """
    return (mx.exp(projected - half - maximum) + eps) * projected.shape[-1] ** -0.5


def running_maximum(x: mx.array, before: mx.array, starts: mx.array | None) -> mx.array:
    """The largest number of each position and those before it in its sample.

    Args:
        x: `(B, H, L)`.
        before: That of all positions that were read before, `(B, H)`.
        starts: Booleans `(B, L)`, `True` where another sample begins.

    Returns:
        `(B, H, L)`.
    """
    x = mx.concatenate([before[..., None], x], axis=-1)
    if starts is None:
        return mx.cummax(x, axis=-1)[..., 1:]
    # whether a position has met the start of its sample
    is_full = mx.pad(starts, [(0, 0), (1, 0)], constant_values=True)[:, None]
    reach, length = 1, x.shape[-1]
    while reach < length:
        further = mx.pad(x[..., :-reach], [(0, 0), (0, 0), (reach, 0)], constant_values=NO_MAXIMUM)
        x = mx.where(is_full, x, mx.maximum(x, further))
        earlier = mx.pad(is_full[..., :-reach], [(0, 0), (0, 0), (reach, 0)], constant_values=True)
        is_full = mx.logical_or(is_full, earlier)
        reach *= 2
    return x[..., 1:]


DENOMINATOR_EPS = 1e-6
"""A constant added to each causal sum of key features, as in performer-pytorch."""


class PerformerState(NamedTuple):
    """The state of a causal `Performer`.

    Attributes:
        sums: The sums of all features of keys with their values and, as a further column, alone, divided
            by the exponential of the maximum, float32 `(B, H, F, K + 1)`.
        maximum: The largest exponent of all keys, float32 `(B, H)`.

    Example:
        >>> y, state = Performer(32)(mx.zeros((2, 5, 32)))
        >>> state.sums.shape
        (2, 8, 5, 5)
    """

    sums: mx.array
    maximum: mx.array


class Performer(TokenMixer):
    r"""Softmax attention by random features, in time linear in the length.

    .. math::
        o_t = \frac{\phi(q_t) \sum_j \phi(k_j)^\top v_j}{\phi(q_t) \cdot \sum_j \phi(k_j)}, \quad
        \phi(x) = F^{-1/2}\big(\exp(W \tilde x - \lVert\tilde x\rVert^2 / 2 - c) + \epsilon\big)

    with :math:`\tilde x = x / K^{1/4}`, and :math:`y_t = W_o o_t`; over `j <= t` if causal and all
    otherwise. The rows of `W` are random and orthogonal by blocks. They are part of the model: `W` is
    saved with the weights and never trained; `redraw` draws others. The constant `c` keeps the
    exponential from overflowing and cancels but for :math:`\epsilon`. It is the largest exponent of a
    query, and of all keys that are seen: where that grows, the sums so far are scaled down. So the
    largest feature is always 1, and no vector is so long that its features fade beside
    :math:`\epsilon`. The estimate
    is good where products of queries and keys are moderate, since its variance grows with their
    exponential.

    Source: Choromanski et al., arXiv 2009.14794.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`, of `K` dims.
        num_features: `F`. Default: `K ln K`.
        kernel: "softmax", or "relu" for :math:`\phi(x) = \mathrm{relu}(W \tilde x) + \epsilon`.
        eps: :math:`\epsilon`. Default: 1e-4, and 1e-3 for "relu".
        key_maximum: What `c` is. "seen": the largest exponent, for keys of a causal mixer the largest
            up to each token. "call": as in performer-pytorch, the largest :math:`W \tilde x`, for
            keys the call's; :math:`\epsilon` then lets a token depend a little on later ones, and
            on how a text is cut into calls, and the attention of long vectors becomes uniform.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.

    Shape:
        `x` and `y`: `(B, L, D)`; `projection_matrix`: `(F, K)`.

    State:
        `PerformerState`; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = Performer(32, num_heads=4, num_features=16)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.sums.shape
        ((1, 5, 32), (1, 4, 16, 9))
    """

    equation: ClassVar[str] = (
        "y_t = phi(q_t) sum_j phi(k_j)^T v_j / ..., phi(x) = exp(W x - x^2 / 2)"
    )
    complexity: ClassVar[str] = "T F D"
    paper: ClassVar[str] = "arXiv 2009.14794"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    partition = Partition(QUERIES_KEYS_VALUES)

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        num_features: int | None = None,
        kernel: Literal["softmax", "relu"] = "softmax",
        eps: float | None = None,
        key_maximum: Literal["seen", "call"] = "seen",
        linear: Linears = Linear,
        bias: bool = False,
        is_causal: bool = True,
    ):
        super().__init__()
        head_dim = dims_of_a_head("Performer", dims, num_heads)
        check_optional_sizes("Performer", num_features=num_features)
        _check_choice("kernel", kernel, ("softmax", "relu"))
        _check_choice("key_maximum", key_maximum, ("seen", "call"))
        by_default = max(1, int(head_dim * math.log(head_dim)))
        self._dims = dims
        self._head_dim = head_dim
        self._features = by_default if num_features is None else num_features
        self.num_heads = num_heads
        self._is_softmax = kernel == "softmax"
        default_eps = 1e-4 if self._is_softmax else 1e-3
        self._eps = default_eps if eps is None else eps
        self._key_maximum = key_maximum
        self.is_causal = is_causal
        inner = {name: [dims] for name in ("query_proj", "key_proj", "value_proj")}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(dims, dims, linear, bias=bias)
        self.redraw()
        self.freeze(keys=["projection_matrix"], recurse=False)

    def redraw(self, key: mx.array | None = None) -> None:
        """Draws another `projection_matrix`, as the paper does every thousand steps of training.

        Args:
            key: Source of randomness; `None`: MLX's global one.
        """
        self.projection_matrix = orthogonal_projection(self._features, self._head_dim, key)

    def unfreeze(self, *args: Any, **kwargs: Any) -> "Performer":
        super().unfreeze(*args, **kwargs)
        self.freeze(keys=["projection_matrix"], recurse=False)
        return self

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> PerformerState | tuple[()]:
        if not self.is_causal:
            return ()
        rows = (batch_size, self.num_heads)
        return PerformerState(
            mx.zeros((*rows, self._features, self._head_dim + 1)), mx.full(rows, NO_MAXIMUM)
        )

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        state: PerformerState | tuple[()],
        context: Context,
    ) -> tuple[mx.array, PerformerState | tuple[()]]:
        q, k, v = (split_heads(part.astype(mx.float32), self.num_heads) for part in (q, k, v))
        q, v = self._query_features(q), recurrence.with_ones(v)
        if isinstance(state, PerformerState):
            k, decay, maximum = self._key_features(k, state.maximum, context)
            o, sums = gated_linear_attention(
                q, k, v, decay, state.sums, valid=context.valid, starts=context.starts
            )
            state = PerformerState(sums, maximum)
            shares = o[..., -1:] + DENOMINATOR_EPS * q.sum(axis=-1, keepdims=True)
        else:
            recurrence.check_no_starts("Performer", context.starts)
            none = mx.full(k.shape[:2], NO_MAXIMUM)
            k, _, _ = self._key_features(k, none, context)
            o = recurrence.attend_to_all(q, k, v, context.valid)
            # features are positive: it is 0 in a row of padding alone, where values are 0 too
            shares = mx.where(o[..., -1:] == 0, 1.0, o[..., -1:])
        return merge_heads(o[..., :-1] / shares), state

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("Performer", x, self._dims)
        q, k, _ = (
            split_heads(part.astype(mx.float32), self.num_heads)
            for part in self.apart(self.project(x))
        )
        q = self._query_features(q)
        k, decay, _ = self._key_features(k, mx.full(k.shape[:2], NO_MAXIMUM), Context())
        if not self.is_causal:
            weights = recurrence.weights_of_kernel(q, k, is_causal=False)
            return weights / weights.sum(axis=-1, keepdims=True)
        weights = recurrence.weights_of_recurrence(q, k, decay)
        least = DENOMINATOR_EPS * q.sum(axis=-1, keepdims=True)
        return weights / (weights.sum(axis=-1, keepdims=True) + least)

    def _query_features(self, q: mx.array) -> mx.array:
        """Features of heads `(B, H, L, K)`, `(B, H, L, F)`."""
        projected, half = exponents(q, self.projection_matrix)
        if not self._is_softmax:
            return relu(projected) + self._eps
        largest = self._largest(projected, half)[..., None]
        return softmax_features(projected, half, largest, self._eps)

    def _largest(self, projected: mx.array, half: mx.array) -> mx.array:
        """The constant of each vector, `(B, H, L)`."""
        whole = projected if self._key_maximum == "call" else projected - half
        return mx.stop_gradient(whole.max(axis=-1))

    def _key_features(
        self, k: mx.array, before: mx.array, context: Context
    ) -> tuple[mx.array, mx.array | None, mx.array]:
        """Features of heads `(B, H, L, K)`.

        Args:
            k: Keys.
            before: The largest exponent of all keys before the call, `(B, H)`.
            context: The tokens of the call.

        Returns:
            `(B, H, L, F)`; what each position scales the sums before it by, `(B, H, L, 1)`; and the
            largest exponent of all keys, `(B, H)`.
        """
        projected, half = exponents(k, self.projection_matrix)
        if not self._is_softmax or not k.shape[2]:
            return relu(projected) + self._eps, None, before
        largest = self._largest(projected, half)
        if context.valid is not None:
            largest = mx.where(context.valid[:, None], largest, NO_MAXIMUM)
        if self.is_causal and self._key_maximum == "seen":
            largest = running_maximum(largest, before, context.starts)
        else:
            whole = mx.maximum(largest.max(axis=-1), before)[..., None]
            largest = mx.broadcast_to(whole, largest.shape)
        earlier = mx.concatenate([before[..., None], largest[..., :-1]], axis=-1)
        if context.valid is not None:
            # keys that do not count must not overflow either
            mask = context.valid[:, None, :, None]
            projected = mx.where(mask, projected, largest[..., None])
        features = softmax_features(projected, half, largest[..., None], self._eps)
        return features, mx.exp(earlier - largest)[..., None], largest[..., -1]


def _check_choice(name: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(
            f"[Performer] '{name}' must be one of {', '.join(known)} but got {given!r:.80}."
        )
