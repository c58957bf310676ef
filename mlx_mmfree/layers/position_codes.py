"""Codes of positions that are added to embedded tokens (Vaswani et al., arXiv 1706.03762, 3.5)."""

import math
from typing import Literal, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .arguments import check_sizes
from .embedding import embed_tokens

Layout = Literal["interleaved", "concatenated"]


class SinusoidalPositions(nn.Module):
    r"""Sines and cosines of falling frequencies.

    .. math::
        a_{p,i} = p\,b^{-2i/D}, \quad P_{p,2i} = \sin a_{p,i}, \quad P_{p,2i+1} = \cos a_{p,i}

    Tensor2tensor, fairseq and Marian put all sines before all cosines: `layout="concatenated"`.

    Args:
        dims: Model dims `D`, an even number.
        base: Base `b` of the wavelengths.
        layout: `"interleaved"` as in the paper, or `"concatenated"`.

    Shape:
        Integers `(...)`, positions from 0; result float32 `(..., D)`.

    Raises:
        ValueError: The dims are odd, or the layout is unknown.

    Example:
        >>> SinusoidalPositions(4)(mx.array([0])).tolist()
        [[0.0, 1.0, 0.0, 1.0]]
    """

    def __init__(self, dims: int, *, base: float = 10000.0, layout: Layout = "interleaved"):
        super().__init__()
        check_sizes("SinusoidalPositions", dims=dims)
        if dims % 2:
            raise ValueError(f"[SinusoidalPositions] 'dims' must be even but got {dims}.")
        if layout not in get_args(Layout):
            known = ", ".join(map(repr, get_args(Layout)))
            raise ValueError(
                f"[SinusoidalPositions] 'layout' must be one of {known} but got {layout!r:.80}."
            )
        self._layout = layout
        turns = base ** (-np.arange(0, dims, 2) / dims) / (2 * np.pi)
        # 11 bits, whose products with positions up to 8,192 are exact, and the rest; no parameters
        exponent = np.frexp(turns)[1]
        coarse = np.ldexp(np.round(np.ldexp(turns, 11 - exponent)), exponent - 11)
        self._coarse = mx.array(coarse.astype(np.float32))
        self._fine = mx.array((turns - coarse).astype(np.float32))

    def __call__(self, positions: mx.array) -> mx.array:
        places = positions[..., None].astype(mx.float32)
        turns = places * self._coarse
        angles = 2 * math.pi * (turns - mx.floor(turns) + places * self._fine)
        parts = [mx.sin(angles), mx.cos(angles)]
        if self._layout == "concatenated":
            return mx.concatenate(parts, axis=-1)
        return mx.flatten(mx.stack(parts, axis=-1), -2)


class LearnedPositions(nn.Module):
    """A learned row for each position, as in BERT and GPT-2.

    A position without a row gives NaN, since an array cannot be looked into without waiting for it.

    Args:
        dims: Model dims `D`.
        max_length: Number of rows.
        offset: Row of position 0; the rows before it belong to padding, as in RoBERTa.

    Shape:
        Integers `(...)`, positions from 0; result `(..., D)`.

    Example:
        >>> LearnedPositions(8, max_length=16)(mx.arange(5)).shape
        (5, 8)
    """

    def __init__(self, dims: int, *, max_length: int, offset: int = 0):
        super().__init__()
        check_sizes("LearnedPositions", dims=dims, max_length=max_length)
        self._offset = offset
        self.max_length = max_length
        self.rows = nn.Embedding(max_length + offset, dims)

    def __call__(self, positions: mx.array) -> mx.array:
        places = positions + self._offset
        count = self.rows.weight.shape[0]
        codes = embed_tokens(self.rows, mx.minimum(places, count - 1))
        return mx.where((places < count)[..., None], codes, mx.array(mx.nan, codes.dtype))
