"""Low-rank adapters of frozen layers: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353)."""

import math
from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..ops import ternarize, ternary_matmul
from .arguments import check_sizes
from .bit_linear import BitLinear, PackedBitLinear
from .packed_linear import PackedLinear

AdapterKind = Literal["lora", "dora"]

ADAPTER_PARAMETERS = ("lora_a", "lora_b", "m")
"""The parameters that an adapter adds; the base keeps its own."""


class LoRALinear(nn.Module):
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

    def __init__(
        self, base: nn.Module, *, rank: int = 8, scale: float = 20.0, dropout: float = 0.0
    ):
        _check(rank, scale, dropout)
        super().__init__()
        outputs, inputs = linear_dims(base)
        self.base = base
        self.dropout = nn.Dropout(dropout)
        self.lora_a, self.lora_b = _fresh(inputs, rank, outputs)
        self._scale, self._dropout_rate = scale, dropout
        base.freeze()

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def dropout_rate(self) -> float:
        return self._dropout_rate

    def _low_rank(self, x: mx.array) -> mx.array:
        inner = self.base.norm(x) if "norm" in self.base else x
        return self._scale * ((self.dropout(inner) @ self.lora_a) @ self.lora_b)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        return y + self._low_rank(x).astype(y.dtype)


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

    def __init__(
        self, base: nn.Module, *, rank: int = 8, scale: float = 20.0, dropout: float = 0.0
    ):
        super().__init__(base, rank=rank, scale=scale, dropout=dropout)
        self._squares = _row_squares(base)
        self.m = mx.sqrt(self._squares)

    def _row_lengths(self) -> mx.array:
        a, b = (mx.stop_gradient(p).astype(mx.float32) for p in (self.lora_a, self.lora_b))
        mixed = 2.0 * multiply(self.base, a.T) + self._scale * ((a.T @ a) @ b)
        return mx.sqrt(self._squares + self._scale * (b * mixed).sum(axis=0))

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        bias = self.base.bias if "bias" in self.base else None
        total = (y if bias is None else y - bias) + self._low_rank(x)
        total = self.m / self._row_lengths() * total
        return (total if bias is None else total + bias).astype(y.dtype)


class LoRAEmbedding(nn.Module):
    r"""A frozen embedding plus a low-rank one: rows :math:`E_t + \alpha\,A_t B`.

    Args:
        base: `nn.Embedding` or `nn.QuantizedEmbedding`.
        rank: Columns of `A`.
        scale: The factor :math:`\alpha`.
        dropout: Probability of dropping a column of `A` while training.

    Parameters:
        `lora_a` `(V, rank)`, uniform; `lora_b` `(rank, D)`, zeros.
    """

    def __init__(
        self, base: nn.Module, *, rank: int = 8, scale: float = 20.0, dropout: float = 0.0
    ):
        _check(rank, scale, dropout)
        super().__init__()
        tokens, dims = linear_dims(base)
        self.base = base
        self.dropout = nn.Dropout(dropout)
        self.lora_a, self.lora_b = _fresh(tokens, rank, dims)
        self._scale, self._dropout_rate = scale, dropout
        base.freeze()

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def dropout_rate(self) -> float:
        return self._dropout_rate

    @property
    def weight(self) -> mx.array:
        return self.base.weight

    def __call__(self, tokens: mx.array) -> mx.array:
        rows: mx.array = self.base(tokens)
        change = self._scale * (self.dropout(self.lora_a[tokens]) @ self.lora_b)
        return rows + change.astype(rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """The embedding as a head: `(..., D)` to `(..., V)`."""
        y: mx.array = self.base.as_linear(x)
        change = self._scale * ((self.dropout(x) @ self.lora_b.T) @ self.lora_a.T)
        return y + change.astype(y.dtype)


class DoRAEmbedding(LoRAEmbedding):
    r"""A `LoRAEmbedding` whose rows keep their own length.

    Args: as `LoRAEmbedding`.

    Parameters:
        As `LoRAEmbedding`, and `m` `(V,)`, at first the row lengths of the base.
    """

    def __init__(
        self, base: nn.Module, *, rank: int = 8, scale: float = 20.0, dropout: float = 0.0
    ):
        super().__init__(base, rank=rank, scale=scale, dropout=dropout)
        tokens = mx.arange(self.lora_a.shape[0])
        self.m = mx.linalg.norm(base(tokens).astype(mx.float32), axis=1)

    def _row_factors(self, tokens: mx.array) -> mx.array:
        """`m` over the length of each adapted row."""
        rows = mx.stop_gradient(super().__call__(tokens)).astype(mx.float32)
        return self.m[tokens] / mx.linalg.norm(rows, axis=-1)

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = super().__call__(tokens)
        return (self._row_factors(tokens)[..., None] * rows).astype(rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y = super().as_linear(x)
        return (self._row_factors(mx.arange(self.lora_a.shape[0])) * y).astype(y.dtype)


_LINEARS = (nn.Linear, nn.QuantizedLinear, BitLinear, PackedBitLinear, PackedLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


def can_adapt(module: nn.Module) -> bool:
    """Whether an adapter can be put on the module."""
    return isinstance(module, _LINEARS + _EMBEDDINGS)


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
    """
    model.freeze()
    linear, embedding = {
        "lora": (LoRALinear, LoRAEmbedding),
        "dora": (DoRALinear, DoRAEmbedding),
    }[kind]
    options: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": dropout}
    adapted = {
        name: (embedding if isinstance(module, _EMBEDDINGS) else linear)(module, **options)
        for name, module in model.named_modules()
        if can_adapt(module) and is_adapted(name, module)
    }
    model.update_modules(tree_unflatten(list(adapted.items())))
    return list(adapted)


def remove_adapters(model: nn.Module) -> nn.Module:
    """Puts the base layers back, in place; returns the model."""
    bases = [
        (name, module.base)
        for name, module in model.named_modules()
        if isinstance(module, (LoRALinear, LoRAEmbedding))
    ]
    model.update_modules(tree_unflatten(bases))
    return model


def linear_dims(layer: nn.Module) -> tuple[int, int]:
    """Rows and columns of the matrix of a layer that can be adapted, as a dense one."""
    if isinstance(layer, (BitLinear, PackedBitLinear, PackedLinear)):
        return layer.output_dims, layer.input_dims
    rows, columns = layer.weight.shape
    if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        columns = columns * 32 // layer.bits
    return rows, columns


def multiply(layer: nn.Module, x: mx.array) -> mx.array:
    """`x W^T` in float32 with the matrix of a linear alone: no norm, no quantisation, no bias."""
    x = x.astype(mx.float32)
    if isinstance(layer, PackedBitLinear):
        return ternary_matmul(x, layer.weight) * layer.scale
    if isinstance(layer, PackedLinear):
        x = x * layer.input_scale if "input_scale" in layer else x
        return ternary_matmul(x, layer.weight) * layer.scale
    if isinstance(layer, nn.QuantizedLinear):
        biases: Any = layer.biases
        return mx.quantized_matmul(
            x,
            layer.weight,
            layer.scales.astype(mx.float32),
            biases.astype(mx.float32),
            group_size=layer.group_size,
            bits=layer.bits,
        )
    weight: mx.array = layer.weight
    if isinstance(layer, BitLinear):
        trits, scale = ternarize(weight)
        return (x @ trits.T) * scale
    return x @ weight.astype(mx.float32).T


def _row_squares(layer: nn.Module) -> mx.array:
    """Squared length of each row of the matrix, float32 `(N,)`, a block of columns at a time."""
    outputs, inputs = linear_dims(layer)
    squares = mx.zeros((outputs,))
    for start in range(0, inputs, 256):
        columns = multiply(layer, mx.eye(min(256, inputs - start), inputs, k=start))
        squares = squares + columns.square().sum(axis=0)
        mx.eval(squares)
    return squares


def _fresh(inputs: int, rank: int, outputs: int) -> tuple[mx.array, mx.array]:
    bound = 1.0 / math.sqrt(inputs)
    return mx.random.uniform(-bound, bound, (inputs, rank)), mx.zeros((rank, outputs))


def _check(rank: int, scale: float, dropout: float) -> None:
    check_sizes("LoRA", rank=rank)
    if not math.isfinite(scale):
        raise ValueError(f"[LoRA] 'scale' must be finite but got {scale}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"[LoRA] 'dropout' must be at least 0 and below 1 but got {dropout}.")
