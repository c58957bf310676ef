"""Low-rank adapters of frozen layers: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353)."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .arguments import check_sizes
from .dense import Linear
from .embedding import apply_head
from .matrix import Matrix, matrix_of

AdapterKind = Literal["lora", "dora"]

ADAPTER_PARAMETERS = ("lora_a", "lora_b", "m")
"""The parameters that an adapter adds; the base keeps its own."""


class AdaptedLayer(nn.Module):
    """Base class of linears and embeddings with an adapter.

    Args: as `LoRALinear`.
    """

    kind: ClassVar[AdapterKind] = "lora"

    def __init__(
        self, base: nn.Module, *, rank: int = 8, scale: float = 20.0, dropout: float = 0.0
    ):
        _check(rank, scale, dropout)
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(dropout)
        self.lora_a, self.lora_b = _fresh(base, rank)
        self._scale, self._dropout_rate = scale, dropout
        base.freeze()

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def dropout_rate(self) -> float:
        return self._dropout_rate

    @property
    def matrix(self) -> Matrix:
        """The matrix of the base."""
        return _matrix(self.base)

    def to_dense(self, dtype: mx.Dtype) -> nn.Module:
        """The layer of MLX whose matrix is the sum of base and adapter."""
        raise NotImplementedError

    def to_ternary(self) -> nn.Module:
        """The packed format of a ternary base, with the sum of base and adapter rounded to trits."""
        raise NotImplementedError


class LoRALinear(AdaptedLayer):
    r"""A frozen linear plus a low-rank one.

    .. math::
        y = \mathrm{base}(x) + \alpha\,(\mathrm{dropout}(u)\,A)\,B

    with `u` what meets the matrix of the base: `x`, or its norm where the base has one inside. The
    activation codes of a ternary base stay what they are; the adapter reads the floats.

    Args:
        base: `nn.Linear`, `nn.QuantizedLinear` or a ternary linear.
        rank: Columns of `A`.
        scale: The factor :math:`\alpha`.
        dropout: Probability of dropping an input of the adapter while training.

    Parameters:
        `lora_a` `(D, rank)`, uniform; `lora_b` `(rank, N)`, zeros: at first the base's result.
    """

    def merged(self) -> mx.array:
        """The sum of base and adapter, float32 `(N, D)`."""
        weight = self.matrix.multiply(mx.eye(self.matrix.input_dims)).T
        return weight + self._scale * (self.lora_a @ self.lora_b).T

    def to_dense(self, dtype: mx.Dtype) -> nn.Module:
        has_bias = "bias" in self.base
        dense = Linear(self.matrix.input_dims, self.matrix.output_dims, has_bias)
        dense.weight = self.merged().astype(dtype)
        if has_bias:
            dense.bias = self.base.bias
        return dense

    def to_ternary(self) -> nn.Module:
        return self.matrix.packed_from(self.merged())

    def _low_rank(self, x: mx.array) -> mx.array:
        inner = self.base.norm(x) if "norm" in self.base else x
        return self._scale * ((self.dropout(inner) @ self.lora_a) @ self.lora_b)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        return y + self._low_rank(x).astype(y.dtype)

    def gathered(
        self, x: mx.array, indices: mx.array, count: int, starts: mx.array | None = None
    ) -> mx.array:
        """Like `Matrix.gathered`: all parts share `A`, and each has its own columns of `B`."""
        low = self.dropout(x.astype(mx.float32)) @ self.lora_a
        own = mx.unflatten(self.lora_b.T, 0, (count, -1)).swapaxes(1, 2)
        is_sorted = starts is not None
        change = mx.gather_mm(
            low[..., None, :], own, rhs_indices=indices, sorted_indices=is_sorted
        )[..., 0, :]
        return self.matrix.gathered(x, indices, count, starts) + self._scale * change


class DoRALinear(LoRALinear):
    r"""A `LoRALinear` whose rows keep their own length.

    .. math::
        y = \frac{m}{\lVert W + \alpha (AB)^\top \rVert_\mathrm{row}} \odot
        \big(W x + \alpha\,(u A) B\big) + b

    The row lengths in the denominator are constants to the gradient (arXiv 2402.09353 sec. 4.3). They
    are computed from :math:`W A` and :math:`A^\top A`, so a packed matrix is never unpacked.

    Args: as `LoRALinear`.

    Parameters:
        As `LoRALinear`, and `m` `(N,)`, at first the row lengths of the base.
    """

    kind = "dora"

    def __init__(
        self, base: nn.Module, *, rank: int = 8, scale: float = 20.0, dropout: float = 0.0
    ):
        super().__init__(base, rank=rank, scale=scale, dropout=dropout)
        self._squares = _row_squares(self.matrix)
        self.m = mx.sqrt(self._squares)

    def merged(self) -> mx.array:
        weight = super().merged()
        return weight * (self.m / _lengths(mx.square(weight).sum(axis=1)))[:, None]

    def _row_lengths(self) -> mx.array:
        a, b = (mx.stop_gradient(p).astype(mx.float32) for p in (self.lora_a, self.lora_b))
        mixed = 2.0 * self.matrix.multiply(a.T) + self._scale * ((a.T @ a) @ b)
        return _lengths(self._squares + self._scale * (b * mixed).sum(axis=0))

    def gathered(
        self, x: mx.array, indices: mx.array, count: int, starts: mx.array | None = None
    ) -> mx.array:
        factors = mx.unflatten(self.m / self._row_lengths(), 0, (count, -1))
        return factors[indices] * super().gathered(x, indices, count, starts)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        bias = self.base.bias if "bias" in self.base else None
        total = (y if bias is None else y - bias) + self._low_rank(x)
        total = self.m / self._row_lengths() * total
        return (total if bias is None else total + bias).astype(y.dtype)


class LoRAEmbedding(AdaptedLayer):
    r"""A frozen embedding plus a low-rank one: rows :math:`E_t + \alpha\,A_t B`.

    Args:
        base: `nn.Embedding` or `nn.QuantizedEmbedding`.
        rank: Columns of `A`.
        scale: The factor :math:`\alpha`.
        dropout: Probability of dropping a column of `A` while training.

    Parameters:
        `lora_a` `(V, rank)`, uniform; `lora_b` `(rank, D)`, zeros.
    """

    @property
    def weight(self) -> mx.array:
        return self.base.weight

    def to_dense(self, dtype: mx.Dtype) -> nn.Module:
        dense = nn.Embedding(self.matrix.output_dims, self.matrix.input_dims)
        dense.weight = self(mx.arange(self.matrix.output_dims)).astype(dtype)
        return dense

    def __call__(self, tokens: mx.array) -> mx.array:
        rows: mx.array = self.base(tokens)
        change = self._scale * (self.dropout(self.lora_a[tokens]) @ self.lora_b)
        return rows + change.astype(rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """The embedding as a head: `(..., D)` to `(..., V)`."""
        y = apply_head(self.base, x)
        change = self._scale * ((self.dropout(x) @ self.lora_b.T) @ self.lora_a.T)
        return y + change.astype(y.dtype)


class DoRAEmbedding(LoRAEmbedding):
    r"""A `LoRAEmbedding` whose rows keep their own length.

    Args: as `LoRAEmbedding`.

    Parameters:
        As `LoRAEmbedding`, and `m` `(V,)`, at first the row lengths of the base.
    """

    kind = "dora"

    def __init__(
        self, base: nn.Module, *, rank: int = 8, scale: float = 20.0, dropout: float = 0.0
    ):
        super().__init__(base, rank=rank, scale=scale, dropout=dropout)
        tokens = mx.arange(self.lora_a.shape[0])
        self.m = mx.linalg.norm(base(tokens).astype(mx.float32), axis=1)

    def _row_factors(self, tokens: mx.array) -> mx.array:
        """`m` over the length of each adapted row."""
        rows = mx.stop_gradient(super().__call__(tokens)).astype(mx.float32)
        return self.m[tokens] / _lengths(mx.square(rows).sum(axis=-1))

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = super().__call__(tokens)
        return (self._row_factors(tokens)[..., None] * rows).astype(rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y = super().as_linear(x)
        return (self._row_factors(mx.arange(self.lora_a.shape[0])) * y).astype(y.dtype)


_KINDS: dict[tuple[AdapterKind, bool], type[AdaptedLayer]] = {
    ("lora", False): LoRALinear,
    ("dora", False): DoRALinear,
    ("lora", True): LoRAEmbedding,
    ("dora", True): DoRAEmbedding,
}


def can_adapt(module: nn.Module) -> bool:
    """Returns whether the module can have an adapter."""
    matrix = matrix_of(module)
    return matrix is not None and not matrix.is_shared


def adapter_shapes(base: nn.Module, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of `ADAPTER_PARAMETERS` on a layer."""
    matrix = _matrix(base)
    rows, columns = matrix.output_dims, matrix.input_dims
    inputs, outputs = (rows, columns) if matrix.is_embedding else (columns, rows)
    return {"lora_a": (inputs, rank), "lora_b": (rank, outputs), "m": (rows,)}


def adapted(
    base: nn.Module, kind: AdapterKind, *, rank: int, scale: float, dropout: float
) -> AdaptedLayer:
    """A fresh adapter on a layer that `can_adapt`. Arguments as `add_adapters`."""
    layer = _KINDS[kind, _matrix(base).is_embedding]
    return layer(base, rank=rank, scale=scale, dropout=dropout)


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """The layers that have an adapter, by their paths."""
    return {
        path: module for path, module in model.named_modules() if isinstance(module, AdaptedLayer)
    }


def add_adapters(
    model: nn.Module,
    is_adapted: Callable[[str, nn.Module], bool],
    *,
    kind: AdapterKind = "lora",
    rank: int = 8,
    scale: float = 20.0,
    dropout: float = 0.0,
) -> list[str]:
    """Freezes `model` and puts a fresh adapter, in place, on each layer that is asked for.

    Args:
        model: Its own parameters are frozen, the adapters' can be trained.
        is_adapted: Called with the name and the module of everything that can be adapted.
        kind: `"lora"` or `"dora"`.
        rank: As in `LoRALinear`.
        scale: As in `LoRALinear`.
        dropout: As in `LoRALinear`.

    Returns:
        The names of the adapted layers.

    Raises:
        ValueError: There are none, so that nothing would be trained.
    """
    layers = {
        name: adapted(module, kind, rank=rank, scale=scale, dropout=dropout)
        for name, module in model.named_modules()
        if can_adapt(module) and is_adapted(name, module)
    }
    if not layers:
        raise ValueError(
            "[LoRA] 'is_adapted' must choose at least one layer that can have an adapter but chose "
            "none, so that nothing would be trained."
        )
    model.freeze()
    model.update_modules(tree_unflatten(list(layers.items())))
    return list(layers)


def remove_adapters(model: nn.Module) -> nn.Module:
    """Puts the base layers back, in place; returns the model."""
    bases = [(path, layer.base) for path, layer in adapted_layers(model).items()]
    model.update_modules(tree_unflatten(bases))
    return model


def _matrix(layer: nn.Module) -> Matrix:
    matrix = matrix_of(layer)
    if matrix is None:
        raise TypeError(
            f"[LoRA] 'base' must be a linear layer or an embedding but got {type(layer).__name__}."
        )
    return matrix


def _lengths(squares: mx.array) -> mx.array:
    """The lengths of rows by their squares; 1 of a row of zeros, which has no direction and stays."""
    return mx.sqrt(mx.where(squares > 0, squares, 1.0))


def _row_squares(matrix: Matrix) -> mx.array:
    """Squared length of each row, float32 `(N,)`, a block of columns at a time."""
    squares = mx.zeros((matrix.output_dims,))
    for start in range(0, matrix.input_dims, 256):
        width = min(256, matrix.input_dims - start)
        columns = matrix.multiply(mx.eye(width, matrix.input_dims, k=start))
        squares = squares + columns.square().sum(axis=0)
        mx.eval(squares)
    return squares


def _fresh(base: nn.Module, rank: int) -> tuple[mx.array, mx.array]:
    shapes = adapter_shapes(base, rank)
    bound = 1.0 / math.sqrt(shapes["lora_a"][0])
    return mx.random.uniform(-bound, bound, shapes["lora_a"]), mx.zeros(shapes["lora_b"])


def _check(rank: int, scale: float, dropout: float) -> None:
    check_sizes("LoRA", rank=rank)
    if not math.isfinite(scale):
        raise ValueError(f"[LoRA] 'scale' must be finite but got {scale}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"[LoRA] 'dropout' must be at least 0 and below 1 but got {dropout}.")
