"""Linformer: attention to a fixed number of projected keys (Wang et al., arXiv 2006.04768)."""

from typing import Any, ClassVar

import mlx.core as mx

from ..layers.arguments import check_sequences, check_sizes, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, one_hot_values, split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, TokenMixer, factory_of
from ..ops import attention


class Linformer(TokenMixer):
    r"""Softmax attention whose keys and values are first projected along the sequence.

    .. math::
        y_t &= W_o\,\big[\mathrm{softmax}\big(q_{t,h}\,\bar K_h^\top / \sqrt{K}\big)\,
        \bar V_h\big]_{h=1..H} \\
        \bar K_h &= E\,K_h, \quad \bar V_h = F\,V_h

    with :math:`E, F \in R^{k \times T}` shared by all heads ("headwise" in the paper). They are made for
    a longest sequence `T`; a shorter one takes their first columns. Each projected key mixes all tokens,
    so that it cannot be causal. Padding is zero before it is projected, and comes after the tokens.
    With a `memory`, keys and values are the memory's, and only its length is bound.

    Source: Wang et al., arXiv 2006.04768.

    Args:
        dims: Model dims `D`.
        max_length: The longest sequence `T` of keys.
        num_projected: Projected keys `k`.
        num_heads: Heads `H`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        shares_lengths: One matrix projects keys and values, :math:`E = F` ("key-value sharing").
        shares_values: Values are the keys, of one projection of the input; then :math:`E = F` too.
        has_one_kv_head: All heads share one head of keys and values.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each. :math:`E` and :math:`F` are
            `key_length_proj` and `value_length_proj`.
        bias: Whether queries, keys and values are projected with a bias.
        output_bias: Whether the output is. Default: `bias`.

    Shape:
        `x` and `y`: `(B, L, D)`; `memory`: `(B, M, D)`.

    State:
        `()`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. A sequence of keys is longer than `max_length`.

    Example:
        >>> Linformer(32, max_length=16, num_projected=4)(mx.zeros((1, 9, 32)))[0].shape
        (1, 9, 32)
    """

    equation: ClassVar[str] = "y = softmax(Q (E K)^T / sqrt(d)) (F V)"
    complexity: ClassVar[str] = "T k D"
    paper: ClassVar[str] = "arXiv 2006.04768"
    bidirectional: ClassVar[bool] = True
    padding_last: ClassVar[bool] = True
    of_memory: ClassVar[tuple[str, ...]] = ("key_proj", "value_proj")
    cross: ClassVar[bool] = True
    length_bound: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        max_length: int,
        num_projected: int = 128,
        num_heads: int = 8,
        head_dim: int | None = None,
        shares_lengths: bool = False,
        shares_values: bool = False,
        has_one_kv_head: bool = False,
        linear: Linears = Linear,
        bias: bool = False,
        output_bias: bool | None = None,
    ):
        super().__init__()
        check_sizes("Linformer", max_length=max_length, num_projected=num_projected)
        head_dim = dims_of_a_head("Linformer", dims, num_heads, head_dim)
        self._dims = dims
        self._max_length = max_length
        self.num_heads = num_heads
        self.num_kv_heads = 1 if has_one_kv_head else num_heads
        widths = {"query_proj": num_heads, "key_proj": self.num_kv_heads}
        lengths = ["key_length_proj"]
        if not shares_values:
            widths["value_proj"] = self.num_kv_heads
            if not shares_lengths:
                lengths.append("value_length_proj")
        inner = {name: [heads * head_dim] for name, heads in widths.items()}
        self.make_projections(dims, inner, linear, bias=bias)
        for name in lengths:
            self[name] = factory_of(linear, name)(max_length, num_projected, bias=False)
        output_bias = bias if output_bias is None else output_bias
        self.make_output(num_heads * head_dim, dims, linear, bias=output_bias)

    @property
    def partition(self) -> Partition:  # type: ignore[override]
        if self.num_kv_heads == 1:
            return Partition({"query_proj": 1})
        return Partition(QUERIES_KEYS_VALUES, counts=("num_heads", "num_kv_heads"))

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def mix(self, q: mx.array, k: mx.array, *others: Any) -> tuple[mx.array, tuple[()]]:
        *v, _, context = others
        is_own = context.memory is None
        length, name = k.shape[1], "x" if is_own else "memory"
        if length > self._max_length:
            raise ValueError(
                f"[Linformer] '{name}' must not be longer than 'max_length', {self._max_length}, but "
                f"has {length} positions."
            )
        counts = context.counts
        if not is_own:
            # the padding of the second sequence is moved after its positions too
            memory = Context(context.memory_valid)
            k, *v = (memory.padding_moved(part) for part in (k, *v))
            counts = memory.with_padding_last().counts
        q = split_heads(q, self.num_heads)
        keys, values = self._along_length(k, *v, counts=counts)
        return merge_heads(attention(q, keys, values)), ()

    def checked_state(self, x: mx.array, state: tuple[()] | None) -> tuple[()]:
        check_sequences("Linformer", x, self._dims)
        return ()

    def mixing_weights(
        self, x: mx.array, *, memory: mx.array | None = None, **arguments: Any
    ) -> mx.array:
        """Mixing weights of the projected keys, `(B, H, L, k)`, which stand at no position."""
        check_sequences("Linformer", x, self._dims)
        q, *others = self.apart(self.project_both(x, x if memory is None else memory))
        k, _ = self._along_length(*others, counts=None)
        q, k = split_heads(q, self.num_heads).astype(mx.float32), k.astype(mx.float32)
        return attention(q, k, one_hot_values(*k.shape[:3]))

    def _along_length(
        self, k: mx.array, v: mx.array | None = None, *, counts: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Keys and values `(B, k, G K)` projected along the length, `(B, G, k, K)` each."""
        made = []
        for heads, name in ((k, "key_length_proj"), (k if v is None else v, "value_length_proj")):
            if counts is not None:
                # a bias is no zero
                is_real = (mx.arange(heads.shape[1]) < counts[:, None])[..., None]
                heads = mx.where(is_real, heads, mx.zeros((), heads.dtype))
            missing = self._max_length - heads.shape[1]
            columns = mx.pad(heads, [(0, 0), (0, missing), (0, 0)]).swapaxes(1, 2)
            along = self[name if name in self else "key_length_proj"]
            made.append(split_heads(along(columns).swapaxes(1, 2), self.num_kv_heads))
        return made[0], made[1]
