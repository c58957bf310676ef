"""Linear attention (Katharopoulos et al., arXiv 2006.16236)."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sequences, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, TokenMixer
from ..layers.recurrence import attend_to_all, check_no_starts, weights_of_kernel, with_ones
from ..ops import gated_linear_attention
from ..ops.activations import elu_plus_one, relu

FeatureMap = Callable[[mx.array], mx.array]

FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu": elu_plus_one,
    "relu": relu,
    "identity": lambda x: x,
}


class LinearAttentionState(NamedTuple):
    """The state of a causal `LinearAttention`.

    Attributes:
        fast_weights: The sums of all keys with their values, float32 `(B, H, F, V)`; normalised, the
            sums of the keys alone are a further column, `(B, H, F, V + 1)`.

    Example:
        >>> y, state = LinearAttention(32)(mx.zeros((2, 5, 32)))
        >>> state.fast_weights.shape
        (2, 8, 4, 5)
    """

    fast_weights: mx.array


class LinearAttention(TokenMixer):
    r"""Attention with a kernel in place of the softmax, in time linear in the length.

    .. math::
        o_t = \frac{\phi(q_t)\,S_t}{\phi(q_t) \cdot z_t + \epsilon}, \quad
        S_t = \sum_{j \le t} \phi(k_j)^\top v_j, \quad z_t = \sum_{j \le t} \phi(k_j)

    and :math:`y_t = W_o o_t`. Not causal, the sums run over all positions. Without the denominator,
    :math:`S` are the weights of a linear layer that the text programs: fast weights (Schlag et al.,
    arXiv 2102.11174). Padding is left out of the sums, since :math:`\phi(0) = 1` would count. With a
    `memory`, keys and values come from all its positions, and the state stays as it is.

    Source: Katharopoulos et al., arXiv 2006.16236.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`.
        head_dim: Dims `K` of a query and a key. Default: `dims / num_heads`.
        value_head_dim: Dims `V` of a value. Default: `head_dim`.
        feature_map: :math:`\phi`: "elu" (elu + 1, as in the paper), "relu", "identity"; or a function or
            module of arrays `(..., K)` that may return another number of features `F`.
        normalize: Whether there is a denominator.
        eps: :math:`\epsilon`, added to it.
        scale: What queries are multiplied by before :math:`\phi`. The paper has no such factor.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.

    Shape:
        `x` and `y`: `(B, L, D)`; `memory`: `(B, M, D)`.

    State:
        `LinearAttentionState`; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = LinearAttention(32, num_heads=4)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.fast_weights.shape
        ((1, 5, 32), (1, 4, 8, 9))
    """

    equation: ClassVar[str] = "y_t = phi(q_t) sum_j phi(k_j)^T v_j / (phi(q_t) sum_j phi(k_j)^T)"
    complexity: ClassVar[str] = "T D^2 / H"
    paper: ClassVar[str] = "arXiv 2006.16236"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    cross: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    of_memory: ClassVar[tuple[str, ...]] = ("key_proj", "value_proj")
    partition = Partition(QUERIES_KEYS_VALUES)

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        feature_map: str | FeatureMap = "elu",
        normalize: bool = True,
        eps: float = 1e-6,
        scale: float = 1.0,
        linear: Linears = Linear,
        bias: bool = False,
        is_causal: bool = True,
    ):
        super().__init__()
        head_dim = dims_of_a_head("LinearAttention", dims, num_heads, head_dim)
        check_optional_sizes("LinearAttention", value_head_dim=value_head_dim)
        value_dim = head_dim if value_head_dim is None else value_head_dim
        self._dims = dims
        self.num_heads = num_heads
        self._value_dim = value_dim
        self.feature_map = _feature_map(feature_map)
        self._features = self.feature_map(mx.zeros((1, head_dim))).shape[-1]
        self._normalize = normalize
        self._eps = eps
        self._scale = scale
        self.is_causal = is_causal
        widths = {"query_proj": head_dim, "key_proj": head_dim, "value_proj": value_dim}
        inner = {name: [num_heads * width] for name, width in widths.items()}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(num_heads * value_dim, dims, linear, bias=bias)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> LinearAttentionState | tuple[()]:
        if not self.is_causal:
            return ()
        columns = self._value_dim + self._normalize
        return LinearAttentionState(mx.zeros((batch_size, self.num_heads, self._features, columns)))

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        state: LinearAttentionState | tuple[()],
        context: Context,
    ) -> tuple[mx.array, LinearAttentionState | tuple[()]]:
        memory = context.memory
        q, k, v = *self._features_of(q, k), self._heads(v)
        v = with_ones(v) if self._normalize else v
        if isinstance(state, LinearAttentionState) and memory is None:
            o, last = gated_linear_attention(
                q, k, v, None, state.fast_weights, valid=context.valid, starts=context.starts
            )
            state = LinearAttentionState(last)
        else:
            check_no_starts("LinearAttention", context.starts)
            seen = context.valid if memory is None else context.memory_valid
            o = attend_to_all(q, k, v, seen)
        if self._normalize:
            o = o[..., :-1] / (o[..., -1:] + self._eps)
        return merge_heads(o), state

    def mixing_weights(
        self, x: mx.array, *, memory: mx.array | None = None, **arguments: Any
    ) -> mx.array:
        check_sequences("LinearAttention", x, self._dims)
        q, k, _ = self.apart(self.project_both(x, x if memory is None else memory))
        q, k = self._features_of(q, k)
        weights = weights_of_kernel(q, k, is_causal=self.is_causal and memory is None)
        if self._normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + self._eps)
        return weights

    def _features_of(self, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        """The features of projected tokens, float32 `(B, H, L, F)` and `(B, H, M, F)`."""
        return self.feature_map(self._heads(q) * self._scale), self.feature_map(self._heads(k))

    def _heads(self, x: mx.array) -> mx.array:
        return split_heads(x, self.num_heads).astype(mx.float32)


def _feature_map(given: str | FeatureMap) -> FeatureMap:
    if not isinstance(given, str):
        return given
    if given not in FEATURE_MAPS:
        raise ValueError(
            f"[LinearAttention] 'feature_map' must be one of {', '.join(FEATURE_MAPS)} or a function "
            f"but got {given!r:.80}."
        )
    return FEATURE_MAPS[given]
