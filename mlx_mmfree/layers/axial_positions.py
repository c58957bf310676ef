"""Codes of very many positions from few rows (Kitaev et al., arXiv 2001.04451, appendix D)."""

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from .arguments import check_sizes


class AxialPositions(nn.Module):
    r"""Positions laid out as a table, with a learned row for each line and one for each column.

    .. math::
        P_p = [U_{\lfloor p / n \rfloor}; V_{p \bmod n}]

    A position beyond the table gives NaN, since an array cannot be looked into without waiting for it.

    Args:
        shape: Lines `m` and columns `n` of the table.
        dims: The dims of a row of `U` and of one of `V`; their sum is the model's.

    Shape:
        Integers `(...)`, positions from 0 to `m n - 1`; result `(..., D)`.

    Example:
        >>> AxialPositions((4, 8), (2, 6))(mx.arange(5)).shape
        (5, 8)
    """

    def __init__(self, shape: Sequence[int], dims: Sequence[int]):
        super().__init__()
        (lines, columns), (line_dims, column_dims) = shape, dims
        check_sizes("AxialPositions", lines=lines, columns=columns)
        check_sizes("AxialPositions", line_dims=line_dims, column_dims=column_dims)
        self.max_length = lines * columns
        # the shapes that checkpoints hold
        self.lines = mx.random.normal((lines, 1, line_dims), scale=1 / math.sqrt(line_dims))
        self.columns = mx.random.normal((1, columns, column_dims), scale=1 / math.sqrt(column_dims))

    def __call__(self, positions: mx.array) -> mx.array:
        by_line, by_column = self.lines[:, 0], self.columns[0]
        lines, columns = by_line.shape[0], by_column.shape[0]
        line = mx.minimum(positions // columns, lines - 1)
        codes = mx.concatenate([by_line[line], by_column[positions % columns]], axis=-1)
        is_inside = positions < lines * columns
        return mx.where(is_inside[..., None], codes, mx.array(mx.nan, codes.dtype))
