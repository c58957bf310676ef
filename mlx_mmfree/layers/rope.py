"""Rotary position embedding (Su et al., arXiv 2104.09864) and the ways to stretch it."""

import math

import mlx.core as mx
import mlx.nn as nn


def rope_wavelengths(dims: int, base: float = 10000.0) -> mx.array:
    r"""Positions per radian of each pair, :math:`\lambda_i = b^{2i/K}`, float32 `(K / 2,)`."""
    return mx.power(base, mx.arange(0, dims, 2, dtype=mx.float32) / dims)


def linear_wavelengths(wavelengths: mx.array, factor: float) -> mx.array:
    """Positions divided by `factor` (Chen et al., arXiv 2306.15595)."""
    return wavelengths * factor


def dynamic_wavelengths(
    dims: int, base: float, *, factor: float, trained_length: int, length: int
) -> mx.array:
    r"""A larger base for texts longer than the trained ones ("dynamic NTK").

    .. math::
        b' = b\,\Big(\frac{f\,n}{n_0} - (f - 1)\Big)^{K/(K-2)}, \quad n = \max(\mathrm{length}, n_0)

    The wavelengths depend on the length of the whole text, so keys that were rotated for another
    length do not fit: choose `length` once for a text.

    Args:
        dims: Head dims `K`.
        base: The base `b` of training.
        factor: Stretching factor `f`.
        trained_length: The longest text of training, `n_0`.
        length: The longest text to come.
    """
    stretch = factor * max(length, trained_length) / trained_length - (factor - 1.0)
    return rope_wavelengths(dims, base * stretch ** (dims / (dims - 2)))


def llama3_wavelengths(
    wavelengths: mx.array,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    trained_length: int,
) -> mx.array:
    """Stretches long wavelengths by `factor`, leaves short ones, and blends in between (Llama 3.1).

    Args:
        wavelengths: Those of training.
        factor: Stretching factor.
        low_freq_factor: Waves longer than `trained_length / low_freq_factor` are stretched in full.
        high_freq_factor: Waves shorter than `trained_length / high_freq_factor` stay.
        trained_length: The longest text of training.
    """
    waves_per_text = trained_length / (2.0 * math.pi * wavelengths)
    kept = (waves_per_text - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = mx.clip(kept, 0.0, 1.0)
    return 1.0 / ((1.0 - kept) / (factor * wavelengths) + kept / wavelengths)


class RoPE(nn.Module):
    r"""Rotates pairs of each head's dims by angles proportional to the position.

    .. math::
        (a, b) \mapsto (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta), \quad
        \theta = p / \lambda_i

    Args:
        dims: Head dims `K`, even.
        base: Base of the wavelengths.
        wavelengths: Positions per radian of each pair, `(K / 2,)`, instead of those of `base`.
        is_interleaved: Pairs are neighbours `(2i, 2i + 1)`, as in the original Llama, instead of
            halves `(i, i + K / 2)`, as in checkpoints of the Hub.

    Shape:
        `x` and result `(B, H, L, K)`; `offset`: the position of the first token, a number or `(B,)`.

    Example:
        >>> RoPE(8)(mx.ones((1, 2, 3, 8)), offset=5).shape
        (1, 2, 3, 8)
    """

    def __init__(
        self,
        dims: int,
        *,
        base: float = 10000.0,
        wavelengths: mx.array | None = None,
        is_interleaved: bool = False,
    ):
        super().__init__()
        if dims < 2 or dims % 2:
            raise ValueError(f"[RoPE] 'dims' must be even and positive but got {dims}.")
        self._dims = dims
        self._is_interleaved = is_interleaved
        # Underscored: no parameters.
        self._wavelengths = rope_wavelengths(dims, base) if wavelengths is None else wavelengths

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            x,
            self._dims,
            traditional=self._is_interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._wavelengths,
        )
