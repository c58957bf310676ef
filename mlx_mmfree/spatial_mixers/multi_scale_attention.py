"""Linear attention over several scales, the mixer of EfficientViT (Cai et al., arXiv 2205.14756)."""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..layers.arguments import check_sizes, dims_of_a_head
from ..layers.dense import Linear
from ..layers.linear import merge_heads
from ..layers.maps import DepthwiseConvolution
from ..layers.matrix import StoredLayout
from ..layers.mixer import Linears, SpatialMixer, factory_of
from ..layers.norms import BatchNorm
from ..layers.recurrence import attend_to_all, with_ones
from ..ops.activations import relu


class GroupedScale(nn.Module):
    """Queries, keys and values gathered from windows: a depthwise convolution, and a map of each part.

    Args:
        groups: Parts of all heads, `3 H`.
        head_dim: Dims `K` of each.
        kernel_size: Side of the windows.
    """

    def __init__(self, groups: int, head_dim: int, kernel_size: int):
        super().__init__()
        self.convolution = DepthwiseConvolution(groups * head_dim, kernel_size, bias=False)
        bound = head_dim**-0.5
        self.weight = mx.random.uniform(-bound, bound, (groups, head_dim, head_dim))

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        groups, dims = self.weight.shape[:2]
        on_disk = (groups * dims, dims, 1, 1)
        return {"weight": StoredLayout.reshaped(on_disk, self.weight.shape)}

    def __call__(self, x: mx.array) -> mx.array:
        groups, dims = self.weight.shape[:2]
        parts = mx.unflatten(self.convolution(x), -1, (groups, dims))[..., None, :]
        return mx.flatten((parts @ self.weight.astype(x.dtype).swapaxes(-1, -2)), -3)


class MultiScaleAttention(SpatialMixer):
    r"""Linear attention of rectified queries and keys, which further heads gather from windows.

    .. math::
        o_p = \frac{\mathrm{relu}(q_p) \sum_r \mathrm{relu}(k_r)^\top v_r}
        {\mathrm{relu}(q_p) \cdot \sum_r \mathrm{relu}(k_r) + \epsilon}, \quad
        y = \mathrm{norm}(W_o\,[o^{(0)} \,|\, o^{(s)}]_s)

    For each scale `s`, queries, keys and values are convolved in windows of `s` x `s` positions and
    mapped within each head, and make as many heads again. Published models have the scale 5 alone,
    although the paper draws 3 and 5. Computed in float32.

    Source: Cai et al., arXiv 2205.14756.

    Args:
        dims: Dims `D`.
        head_dim: Dims `K` of a head; there are `dims / head_dim`.
        scales: Sides of the windows, odd numbers.
        eps: :math:`\epsilon`; 1e-15 in the original code.
        norm_eps: Epsilon of the batch norm.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.

    Shape:
        `x` and `y`: `(B, H, W, D)`. `qkv_proj` gives query, key and value of each head in turn.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size or an input does not fit. The heads do not divide the dims.

    Example:
        >>> MultiScaleAttention(32, head_dim=8)(mx.zeros((1, 5, 4, 32))).shape
        (1, 5, 4, 32)
    """

    equation: ClassVar[str] = "y = relu(q) sum relu(k)^T v / (relu(q) sum relu(k)^T), over scales"
    complexity: ClassVar[str] = "T D K"
    paper: ClassVar[str] = "arXiv 2205.14756"

    def __init__(
        self,
        dims: int,
        *,
        head_dim: int = 16,
        scales: Sequence[int] = (5,),
        eps: float = 1e-5,
        norm_eps: float = 1e-5,
        linear: Linears = Linear,
    ):
        super().__init__()
        check_sizes("MultiScaleAttention", dims=dims, head_dim=head_dim)
        num_heads = dims_of_a_head("MultiScaleAttention", dims, head_dim)
        self._dims = dims
        self._head_dim = head_dim
        self._eps = eps
        self.make_projections(dims, {"qkv_proj": [3 * dims]}, linear)
        self.scales = [GroupedScale(3 * num_heads, head_dim, side) for side in scales]
        make = factory_of(linear, "output_proj")
        self.output_proj = make((1 + len(self.scales)) * dims, dims, bias=False)
        self.output_norm = BatchNorm(dims, eps=norm_eps)

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        dims, width = self._dims, (1 + len(self.scales)) * self._dims
        return {
            "qkv_proj.weight": StoredLayout.convolution(3 * dims, dims, 1),
            "output_proj.weight": StoredLayout.convolution(dims, width, 1),
        }

    def mix(self, own: mx.array) -> mx.array:
        every = mx.concatenate([own, *(scale(own) for scale in self.scales)], axis=-1)
        heads = mx.unflatten(mx.flatten(every, 1, 2), -1, (-1, 3 * self._head_dim))
        q, k, v = mx.split(heads.swapaxes(1, 2).astype(mx.float32), 3, axis=-1)
        o = attend_to_all(relu(q), relu(k), with_ones(v), None)
        o = merge_heads(o[..., :-1] / (o[..., -1:] + self._eps))
        return self.output_norm.of_linear(
            self.output_proj, o.astype(own.dtype).reshape(*own.shape[:3], -1)
        )
