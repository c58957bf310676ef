"""Linear layers of which each process of a group holds a part (tensor parallelism).

After Shoeybi et al. (arXiv 1909.08053): a projection split by outputs needs no communication, the one
after it is split by inputs and sums its parts over the group. Dense and quantised linears become
MLX's own sharded ones; here are the ternary ones.
"""

from collections.abc import Sequence
from copy import copy
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear

from ..ops import gated, packed_columns, rms_norm_quantize, ternary_matmul
from ..ops.activations import Activation
from .arguments import check_features
from .fusing import Sharded, Variant
from .linear import PackedBitLinear, PackedLinear
from .matrix import matrix_of
from .mixer import Group, part_of
from .norms import RMSNorm


class ShardedRMSNorm(RMSNorm):
    r"""RMSNorm of vectors whose parts lie on the processes of a group.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}\,w

    with the mean over the parts of all processes, in float32.

    Args:
        norm: The norm of whole vectors.
        group: The processes.

    Shape:
        `x` and `y`: `(..., D / size)`.
    """

    def __init__(self, norm: RMSNorm, group: Group):
        super().__init__(norm.weight.shape[0] // group.size(), eps=norm.eps)
        self._dims = norm.weight.shape[0]
        self._group = group
        self.weight = part_of(norm.weight, group)

    def __call__(self, x: mx.array) -> mx.array:
        y = x.astype(mx.float32)
        total = mx.distributed.all_sum(y.square().sum(axis=-1, keepdims=True), group=self._group)
        y = y * mx.rsqrt(total / self._dims + self.eps) * self.weight.astype(mx.float32)
        return y.astype(x.dtype)


class ShardedToAllBitLinear(PackedBitLinear):
    r"""A `PackedBitLinear` of which each process multiplies its part of the inputs.

    .. math::
        y = \Big(\sum_r q_r\,t_r^\top\Big)\,m / s + b

    The sums over :math:`r` are sums of integers, and the activation scale :math:`s` comes from the
    largest magnitude over all processes: codes and products are as in one process. Where a norm
    lies before, the processes exchange its input and each computes the whole norm, since a mean square
    that is added up in another order would move codes at rounding boundaries.

    Args:
        linear: The whole layer.
        group: The processes; their number divides the inputs.

    Shape:
        Input `(..., input_dims / size)`, result `(..., output_dims)`, the same on all processes.
    """

    variant: ClassVar[type[Variant]] = Sharded
    is_divisible = False

    def __init__(self, linear: PackedBitLinear, group: Group):
        width = linear.input_dims // group.size()
        eps, rounding, quantize = linear.activations
        super().__init__(
            width,
            linear.output_dims,
            "bias" in linear,
            norm_eps=eps,
            rounding=rounding,
            quantize_activations=quantize,
        )
        self._group = group
        start = group.rank() * width
        self.weight = packed_columns(linear.weight, linear.input_dims, start, start + width)
        self.scale = linear.scale
        if "norm" in linear:
            self.norm = linear.norm
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, x: mx.array) -> mx.array:
        return self.project(x)

    def project(
        self,
        x: mx.array,
        *,
        gate: Activation | None = None,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
    ) -> mx.array:
        """The layer with what lies around it, in float32, as `fusing.output` has it.

        `norm` acts on whole tokens.
        """
        check_features("BitLinear", x, self.input_dims * (1 if gate is None else 2))
        z = x.astype(mx.float32)
        if gate is not None:
            z = gated(z, gate)
        norms = [each for each in (norm, self.norm if "norm" in self else None) if each is not None]
        z, input_scale = self._quantize(z) if not norms else self._encode(z, norms)
        if input_scale is None:
            y = self._sum(ternary_matmul(z, self.weight)) * self.scale
        else:
            sums = self._sum(ternary_matmul(z, self.weight, codes=True).astype(mx.int32))
            y = sums.astype(mx.float32) * (self.scale / input_scale)
        if "bias" in self:
            y = y + self.bias
        return (y if residual is None else y + residual).astype(x.dtype)

    def _sum(self, part: mx.array) -> mx.array:
        total: mx.array = mx.distributed.all_sum(part, group=self._group)
        return total

    def _gather(self, part: mx.array) -> mx.array:
        """The parts of all processes, `(size, ...)`."""
        parts: mx.array = mx.distributed.all_gather(part[None], group=self._group)
        return parts

    def _quantize(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """Codes of this process' part of each token, with the scale of the whole token."""
        if not self._quantize_activations:
            return x, None
        # gathered, since MLX's maximum over processes may lose a NaN, which only the scale carries
        # past the integers
        largest = self._gather(mx.abs(x).max(axis=-1, keepdims=True)).max(axis=0)
        codes, scale = rms_norm_quantize(
            mx.concatenate([x, largest], axis=-1), rounding=self._rounding
        )
        return codes[..., :-1], scale

    def _encode(self, x: mx.array, norms: Sequence[nn.Module]) -> tuple[mx.array, mx.array | None]:
        """This process' part of each token after norms of the whole token, as codes with a scale."""
        whole = mx.moveaxis(self._gather(x), 0, -2).flatten(-2)
        start = self._group.rank() * self.input_dims
        part = (..., slice(start, start + self.input_dims))
        last = norms[-1] if self._quantize_activations else None
        for norm in norms:
            if norm is not last:
                whole = mx.fast.rms_norm(whole, norm.weight.astype(mx.float32), norm.eps)
        if last is None:
            return whole[part], None
        codes, scale = rms_norm_quantize(whole, last.weight, eps=last.eps, rounding=self._rounding)
        return codes[part], scale


class ShardedToAllPackedLinear(PackedLinear):
    r"""A `PackedLinear` of which each process multiplies its part of the inputs.

    .. math::
        y = \Big(\sum_r (x_r \odot c_r)\,t_r^\top\Big) \odot r + b

    Args:
        linear: The whole layer.
        group: The processes; their number divides the inputs.

    Shape:
        Input `(..., input_dims / size)`, result `(..., output_dims)`, the same on all processes.
    """

    is_divisible = False

    def __init__(self, linear: PackedLinear, group: Group):
        width = linear.input_dims // group.size()
        super().__init__(width, linear.output_dims)
        self._group = group
        start = group.rank() * width
        self.weight = packed_columns(linear.weight, linear.input_dims, start, start + width)
        self.scale = linear.scale
        if "input_scale" in linear:
            self.input_scale = part_of(linear.input_scale, group)
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, x: mx.array) -> mx.array:
        check_features("PackedLinear", x, self.input_dims)
        scaled = x.astype(mx.float32)
        if "input_scale" in self:
            scaled = scaled * self.input_scale
        sums = mx.distributed.all_sum(ternary_matmul(scaled, self.weight), group=self._group)
        y = sums * self.scale
        return (y + self.bias if "bias" in self else y).astype(x.dtype)


def can_shard(linear: nn.Module) -> bool:
    """Returns whether a linear layer can be split, once it is packed if it can be."""
    matrix = matrix_of(linear)
    return hasattr(linear, "to_packed") or (matrix is not None and matrix.is_divisible)


def all_to_sharded(linear: nn.Module, group: Group, sections: int = 1) -> nn.Module:
    """The part of a linear layer that makes this process' share of the outputs, of each section."""
    if not isinstance(linear, PackedBitLinear | PackedLinear):
        dense: nn.Module = shard_linear(linear, "all-to-sharded", segments=sections, group=group)
        return dense
    part = copy(linear)
    part.output_dims = linear.output_dims // group.size()
    part.weight = part_of(linear.weight, group, sections)
    if linear.scale.size > 1:
        part.scale = part_of(linear.scale, group, sections)
    if "bias" in linear:
        part.bias = part_of(linear.bias, group, sections)
    return part


def sharded_to_all(linear: nn.Module, group: Group) -> nn.Module:
    """The part of a linear layer that reads this process' share of the inputs."""
    if isinstance(linear, PackedBitLinear):
        return ShardedToAllBitLinear(linear, group)
    if isinstance(linear, PackedLinear):
        return ShardedToAllPackedLinear(linear, group)
    dense: nn.Module = shard_linear(linear, "sharded-to-all", group=group)
    return dense


def sharded_norm(norm: RMSNorm, linear: nn.Module, group: Group) -> RMSNorm:
    """The norm before a layer of `sharded_to_all`, whole where the layer takes it of whole tokens."""
    return norm if isinstance(linear, ShardedToAllBitLinear) else ShardedRMSNorm(norm, group)
