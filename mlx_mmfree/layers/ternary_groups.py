"""The training form of linears that become codes of 2 bits with a scale for neighbouring inputs."""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..ops import pack_ternary
from ..ops.long_sums import long_mean
from ..ops.ternary import straight_through
from .matrix import Matrix

Scales = Literal["group", "row", "tensor"]


@dataclass(frozen=True)
class TernaryScheme:
    r"""How a matrix of floats is made ternary.

    .. math::
        m_G = \mathrm{mean}_{G}\,|W|, \qquad
        t = \mathrm{sign}(W) \cdot [\,|W| > \tau\,m_G\,], \qquad
        s_G = \mathrm{mean}_{G, t \neq 0}\,|W| \ \text{or}\ m_G

    over the inputs G that share a scale. The matrix becomes :math:`t\,s_G`, with scales rounded to
    float16, which is what GGUF's Q2_0 and MLX's affine form hold.

    Source: ternary weight networks (Li et al., arXiv 1605.04711) for the threshold and the mean of what
    is kept; BitNet b1.58 (Ma et al., arXiv 2402.17764) for :math:`\tau = 1/2` and the mean of all.

    Attributes:
        scales: What shares a scale: a group of 64 inputs of a row, a row, or the matrix.
        threshold: :math:`\tau`.
        keeps_mean: The scale is the mean magnitude of all weights, not of those that are kept.
        group_size: Inputs of a group, and of what the codes of the packed form share.
    """

    scales: Scales = "group"
    threshold: float = 0.5
    keeps_mean: bool = True
    group_size: int = 64

    def applied(self, weight: mx.array) -> tuple[mx.array, mx.array]:
        """The trits of a matrix `(N, D)`, and the scales of its groups, float16 `(N, D / G)`."""
        rows = weight.shape[0]
        sizes = mx.abs(weight.astype(mx.float32)).reshape(rows, -1, self.group_size)
        means = self._shared(sizes)
        is_kept = (sizes > self.threshold * means).astype(mx.float32)
        scales = means
        if not self.keeps_mean:
            scales = self._shared(sizes * is_kept) / mx.maximum(self._shared(is_kept), 1e-6)
        scales = mx.clip(scales, 2.0**-14, 65504.0).astype(mx.float16)
        trits = is_kept.reshape(weight.shape) * mx.sign(weight.astype(mx.float32))
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

    with the trits and scales of a `TernaryScheme`. The gradient is straight-through. Its packed form is
    MLX's `QuantizedLinear` of 2 bits, so that nothing is added to the model.

    Args:
        linear: Gives the weight and the bias.
        scheme: How the weight is made ternary.

    Shape:
        Input `(..., input_dims)`, result `(..., output_dims)`.

    Raises:
        ValueError: The groups do not divide the inputs.

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
        if linear.weight.shape[1] % scheme.group_size:
            raise ValueError(
                f"[TernaryGroupLinear] 'group_size' must divide the {linear.weight.shape[1]} inputs but "
                f"is {scheme.group_size}."
            )
        self.weight = linear.weight
        if "bias" in linear:
            self.bias = linear.bias
        self._scheme = scheme
        self._quantization_strength = 1.0

    @property
    def input_dims(self) -> int:
        return int(self.weight.shape[1])

    @property
    def output_dims(self) -> int:
        return int(self.weight.shape[0])

    def ternary_weight(self) -> mx.array:
        r"""The matrix :math:`t\,s_G`, float32."""
        trits, scales = self._scheme.applied(self.weight)
        rows, groups = scales.shape
        scaled = trits.reshape(rows, groups, -1) * scales.astype(mx.float32)[..., None]
        return scaled.reshape(self.weight.shape)

    def packed_trits(self) -> mx.array:
        """The words of its trits, as `ops.pack_ternary` makes them."""
        return pack_ternary(self._scheme.applied(self.weight)[0])

    def to_packed(self) -> nn.QuantizedLinear:
        """The same layer with codes of 2 bits, scales and biases, in float16."""
        trits, scales = self._scheme.applied(self.weight)
        packed = nn.QuantizedLinear(
            self.input_dims, self.output_dims, "bias" in self, self._scheme.group_size, 2
        )
        packed.weight, packed.scales, packed.biases = pack_ternary(trits), scales, -scales
        if "bias" in self:
            packed.bias = self.bias
        return packed

    def multiply(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32) @ self.ternary_weight().T

    def __call__(self, x: mx.array) -> mx.array:
        floats = self.weight.astype(mx.float32)
        quantized = mx.stop_gradient(self.ternary_weight())
        if self._quantization_strength < 1:
            quantized = floats + self._quantization_strength * (quantized - floats)
        y = x.astype(mx.float32) @ straight_through(quantized, floats).T
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
    linears = [(path, each) for path, each in blocks.named_modules() if type(each) is nn.Linear]
    ternary = [(path, TernaryGroupLinear(each, scheme)) for path, each in linears]
    blocks.update_modules(tree_unflatten(ternary))
    return blocks
