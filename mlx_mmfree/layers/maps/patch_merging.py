"""Between the stages of a Swin (Liu et al., arXiv 2103.14030)."""

import mlx.core as mx
import mlx.nn as nn

from ..arguments import check_sizes
from ..layer_norm import LayerNorm
from ..linear_factory import LinearFactory


class PatchMerging(nn.Module):
    r"""Four neighbouring places become one with other dims.

    .. math::
        y_{ij} = W\,\mathrm{LN}\big([x_{2i,2j} \,|\, x_{2i+1,2j} \,|\, x_{2i,2j+1} \,|\,
        x_{2i+1,2j+1}]\big)

    A map with an odd number of rows or columns is padded with zeros.

    Args:
        dims: Dims `D`.
        output_dims: Dims behind it. Default: `2 * dims`.
        norm_eps: Epsilon of the norm.
        linear: Makes the projection, called as `linear(input_dims, output_dims, bias=...)`.

    Shape:
        `x`: `(B, H, W, D)`; `y`: `(B, H / 2, W / 2, output_dims)`, rounded up.

    Example:
        >>> PatchMerging(8)(mx.zeros((1, 5, 4, 8))).shape
        (1, 3, 2, 16)
    """

    def __init__(
        self,
        dims: int,
        *,
        output_dims: int | None = None,
        norm_eps: float = 1e-5,
        linear: LinearFactory = nn.Linear,
    ):
        super().__init__()
        output_dims = 2 * dims if output_dims is None else output_dims
        check_sizes("PatchMerging", dims=dims, output_dims=output_dims)
        self.norm = LayerNorm(4 * dims, eps=norm_eps)
        self.reduction = linear(4 * dims, output_dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        height, width = x.shape[1:3]
        if height % 2 or width % 2:
            x = mx.pad(x, [(0, 0), (0, height % 2), (0, width % 2), (0, 0)])
        parts = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
        y: mx.array = self.reduction(self.norm(mx.concatenate(parts, axis=-1)))
        return y
