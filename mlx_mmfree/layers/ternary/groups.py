"""The training variant of linears that become codes of 2 bits with a scale for neighbouring inputs."""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...ops import hadamard, pack_ternary
from ...ops.long_sums import long_mean
from ...ops.ternary import straight_through
from ..dense import QuantizedLinear
from ..matrix import Matrix, matrices
from ..rotated import RotatedLinear

Scales = Literal["group", "row", "tensor"]


@dataclass(frozen=True)
class TernaryScheme:
    r"""How a matrix of floats is made ternary.

    .. math::
        m_G = \mathrm{mean}_{G}\,|W|, \qquad
        t = \mathrm{sign}(W) \cdot [\,|W| > \tau\,m_G\,], \qquad
        s_G = \mathrm{mean}_{G, t \neq 0}\,|W| \ \text{or}\ m_G

    over the inputs G that share a scale. The matrix becomes :math:`t\,s_G`, with scales rounded to
    float16, which is what GGUF's Q2_0 and MLX's affine format hold. With a `block`, each row of W is
    first rotated by `ops.hadamard`, which spreads what is large over the inputs of a block.

    Source: ternary weight networks (Li et al., arXiv 1605.04711) for the threshold and the mean of what
    is kept; BitNet b1.58 (Ma et al., arXiv 2402.17764) for :math:`\tau = 1/2` and the mean of all.

    Attributes:
        scales: What shares a scale: a group of 64 inputs of a row, a row, or the matrix.
        threshold: :math:`\tau`.
        keeps_mean: The scale is the mean magnitude of all weights, not of those that are not zero.
        group_size: Inputs of a group, and of what the codes of the packed format share.
        block: Inputs that are rotated together, a power of two; 0 rotates none.
    """

    scales: Scales = "group"
    threshold: float = 0.5
    keeps_mean: bool = True
    group_size: int = 64
    block: int = 0

    def applied(self, weight: mx.array) -> tuple[mx.array, mx.array]:
        """The trits of a matrix `(N, D)`, and the scales of its groups, float16 `(N, D / G)`."""
        rows = weight.shape[0]
        sizes = mx.abs(weight.astype(mx.float32)).reshape(rows, -1, self.group_size)
        means = self._shared(sizes)
        is_nonzero = (sizes > self.threshold * means).astype(mx.float32)
        scales = means
        if not self.keeps_mean:
            scales = self._shared(sizes * is_nonzero) / mx.maximum(self._shared(is_nonzero), 1e-6)
        scales = mx.clip(scales, 2.0**-14, 65504.0).astype(mx.float16)
        trits = is_nonzero.reshape(weight.shape) * mx.sign(weight.astype(mx.float32))
        return trits, mx.broadcast_to(scales, (*sizes.shape[:2], 1))[..., 0]

    def _shared(self, sizes: mx.array) -> mx.array:
        """The mean of what shares a scale, `(N, D / G, 1)` with axes of length 1."""
        if self.scales == "group":
            return mx.mean(sizes, axis=2, keepdims=True)
        if self.scales == "row":
            return mx.mean(sizes, axis=(1, 2), keepdims=True)
        return long_mean(sizes).reshape(1, 1, 1)


class TernaryGroupLinear(Matrix, nn.Module):
    r"""A linear layer with float activations whose float weight is made ternary in each call.

    .. math::
        y = x\,(t\,s_G)^\top + b

    with the trits and scales of a `TernaryScheme`. The gradient is straight-through. Its packed format
    is MLX's `QuantizedLinear` of 2 bits, so that nothing is added to the model. Where the scheme rotates
    the weight, so is `x`, with random signs, and the packed format is a `RotatedLinear`.

    Args:
        linear: Gives the weight and the bias.
        scheme: How the weight is made ternary.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Raises:
        ValueError: The groups or blocks do not divide the inputs, or a linear to rotate has a bias.

    Example:
        >>> layer = TernaryGroupLinear(nn.Linear(64, 32), TernaryScheme())
        >>> packed = layer.to_packed()
        >>> x = mx.random.normal((2, 64))
        >>> packed.bits, mx.allclose(layer(x), packed(x), atol=1e-4).item()
        (2, True)
    """

    holds_floats = True
    is_ternary = True

    def __init__(self, linear: nn.Module, scheme: TernaryScheme):
        super().__init__()
        dims = linear.weight.shape[1]
        if dims % scheme.group_size or dims % (scheme.block or 1):
            raise ValueError(
                f"[TernaryGroupLinear] 'group_size' and 'block' must divide the {dims} inputs but are "
                f"{scheme.group_size} and {scheme.block}."
            )
        if scheme.block and "bias" in linear:
            raise ValueError(
                "[TernaryGroupLinear] 'block' must be 0 for a linear with a bias but is "
                f"{scheme.block}."
            )
        self.weight = linear.weight
        if "bias" in linear:
            self.bias = linear.bias
        self._scheme = scheme
        self._quantization_strength = 1.0
        # one choice for all layers, so that those that share an input share its rotation
        is_minus = mx.random.bernoulli(0.5, (dims,), key=mx.random.key(0))
        self._signs = mx.where(is_minus, -1.0, 1.0) if scheme.block else None

    def _rotated(self, x: mx.array) -> mx.array:
        """Rows as they meet the trits, float32."""
        x = x.astype(mx.float32)
        return x if self._signs is None else hadamard(x, self._scheme.block, self._signs)

    @property
    def input_dims(self) -> int:
        return int(self.weight.shape[1])

    @property
    def output_dims(self) -> int:
        return int(self.weight.shape[0])

    def ternary_weight(self) -> mx.array:
        r"""The matrix :math:`t\,s_G`, float32, which meets rotated rows if the scheme rotates."""
        return self._ternary(self._rotated(self.weight))

    def _ternary(self, floats: mx.array) -> mx.array:
        trits, scales = self._scheme.applied(floats)
        rows, groups = scales.shape
        scaled = trits.reshape(rows, groups, -1) * scales.astype(mx.float32)[..., None]
        return scaled.reshape(floats.shape)

    def packed_trits(self) -> mx.array:
        """The words of its trits, as `ops.pack_ternary` makes them."""
        return pack_ternary(self._scheme.applied(self._rotated(self.weight))[0])

    def to_packed(self) -> nn.Module:
        """The same layer with codes of 2 bits, scales and biases, in float16."""
        trits, scales = self._scheme.applied(self._rotated(self.weight))
        sizes, group_size = (self.input_dims, self.output_dims), self._scheme.group_size
        packed: nn.Module
        if self._signs is None:
            packed = QuantizedLinear(*sizes, "bias" in self, group_size, 2)
        else:
            packed = RotatedLinear(*sizes, group_size=group_size, bits=2, block=self._scheme.block)
            packed.signs = self._signs
        packed.weight, packed.scales, packed.biases = pack_ternary(trits), scales, -scales
        if "bias" in self:
            packed.bias = self.bias
        return packed

    def multiply(self, x: mx.array) -> mx.array:
        return self._rotated(x) @ self.ternary_weight().T

    def __call__(self, x: mx.array) -> mx.array:
        floats = self._rotated(self.weight)
        quantized = mx.stop_gradient(self._ternary(floats))
        if self._quantization_strength < 1:
            quantized = floats + self._quantization_strength * (quantized - floats)
        y = self._rotated(x) @ straight_through(quantized, floats).T
        return (y + self.bias).astype(x.dtype) if "bias" in self else y.astype(x.dtype)


def make_ternary(blocks: nn.Module, scheme: TernaryScheme) -> nn.Module:
    """Replaces, in place, the dense linears of the blocks of a model by `TernaryGroupLinear`.

    Args:
        blocks: What holds the linears; an embedding and an output head stay outside.
        scheme: How they are made ternary.

    Returns:
        The blocks.

    Example:
        >>> model = make_ternary(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), TernaryScheme())
        >>> [type(layer).__name__ for layer in model.layers]
        ['TernaryGroupLinear', 'ReLU']
    """
    ternary = [
        (path, TernaryGroupLinear(matrix.layer, scheme))
        for path, matrix in matrices(blocks).items()
        if matrix.is_plain and not matrix.is_embedding
    ]
    blocks.update_modules(tree_unflatten(ternary))
    return blocks
