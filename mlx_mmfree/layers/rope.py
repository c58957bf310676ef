"""Rotary position embedding (Su et al., arXiv 2104.09864) and the ways to stretch it."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .arguments import check_sizes


def rope_wavelengths(dims: int, base: float = 10000.0) -> mx.array:
    r"""Positions per radian of each pair, :math:`\lambda_i = b^{2i/K}`, float32 `(K / 2,)`.

    The power is rounded once, on any device: at position 8,192 its last bit turns a pair by 1e-3.
    """
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    return mx.array(np.power(float(base), exponents.astype(np.float64)).astype(np.float32))


def linear_wavelengths(wavelengths: mx.array, factor: float) -> mx.array:
    """Positions divided by `factor` (Chen et al., arXiv 2306.15595)."""
    return wavelengths * factor


def dynamic_wavelengths(
    dims: int, base: float, *, factor: float, trained_length: int, length: int | mx.array
) -> mx.array:
    r"""A larger base for texts longer than the trained ones ("dynamic NTK").

    .. math::
        b' = b\,\Big(\frac{f\,n}{n_0} - (f - 1)\Big)^{K/(K-2)}, \quad n = \max(\mathrm{length}, n_0)

    Args:
        dims: Head dims `K`, more than 2.
        base: The base `b` of training.
        factor: Stretching factor `f`.
        trained_length: The longest text of training, `n_0`.
        length: The length of the text so far, a number or an array `(...)`.

    Returns:
        `(K / 2,)`, or `(..., K / 2)` for an array.
    """
    longest = mx.maximum(length, trained_length)[..., None].astype(mx.float32)
    stretch = factor * longest / trained_length - (factor - 1.0)
    pair = mx.arange(0, dims, 2, dtype=mx.float32)
    return rope_wavelengths(dims, base) * mx.power(stretch, pair / (dims - 2))


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
    return _blended(wavelengths, factor, kept)


def yarn_wavelengths(
    wavelengths: mx.array,
    *,
    base: float,
    factor: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    trained_length: int,
    is_rounded: bool = True,
) -> mx.array:
    r"""Stretches pairs that turn rarely by `factor`, leaves those that turn often, blends in between
    (YaRN, Peng et al., arXiv 2309.00071).

    Pair i turns :math:`\beta` times within the trained length :math:`n_0` at

    .. math::
        i(\beta) = \frac{K}{2} \, \frac{\ln(n_0 / 2 \pi \beta)}{\ln b}

    and the blend is linear in i from :math:`i(\beta_{fast})` to :math:`i(\beta_{slow})`.

    Args:
        wavelengths: Those of training, `(K / 2,)`.
        base: Their base b.
        factor: Stretching factor.
        beta_fast: Pairs that turn more often stay.
        beta_slow: Pairs that turn less often are stretched in full.
        trained_length: The longest text of training.
        is_rounded: Blend from a whole pair to a whole pair, the next ones outside.
    """
    dims = 2 * wavelengths.size
    low, high = (
        dims * math.log(trained_length / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))
        for turns in (beta_fast, beta_slow)
    )
    if is_rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = (mx.arange(wavelengths.size, dtype=mx.float32) - low) / (high - low)
    return _blended(wavelengths, factor, 1.0 - ramp)


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    r"""What YaRN multiplies rotated queries and keys by, :math:`1 + 0.1\,w \ln f`, 1 for `f <= 1`."""
    return 1.0 if factor <= 1.0 else 1.0 + 0.1 * weight * math.log(factor)


def _blended(wavelengths: mx.array, factor: float, kept: mx.array) -> mx.array:
    """A mean of stretched and kept frequencies; the ends stay exact, since positions multiply errors."""
    stretched = factor * wavelengths
    mean = 1.0 / ((1.0 - kept) / stretched + kept / wavelengths)
    return mx.where(kept >= 1.0, wavelengths, mx.where(kept <= 0.0, stretched, mean))


class RoPE(nn.Module):
    r"""Rotates pairs of each head's dims by angles proportional to the position.

    .. math::
        (a, b) \mapsto (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta), \quad
        \theta = p / \lambda_i

    Source: Su et al., arXiv 2104.09864.

    Args:
        dims: Head dims `K`, even.
        base: Base of the wavelengths.
        wavelengths: Positions per radian of each pair, `(K / 2,)`, instead of those of `base`.
        is_interleaved: Pairs are neighbours `(2i, 2i + 1)`, as in the original Llama, instead of
            halves `(i, i + K / 2)`, as in checkpoints of the Hub.
        attention_factor: What YaRN multiplies rotated queries and keys by. It is not applied here:
            attention multiplies its queries by the square, so that a state holds plain keys.

    Shape:
        `x` and result `(B, H, L, K)`; `offset`: the position of the first token, a number or `(B,)`,
        or of each token, `(B, L)`.

    Raises:
        TypeError: The dims are not an integer.
        ValueError: The dims are not even, or the base is not positive.

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
        attention_factor: float = 1.0,
    ):
        super().__init__()
        check_sizes("RoPE", dims=dims)
        if dims % 2:
            raise ValueError(f"[RoPE] 'dims' must be even but got {dims}.")
        if wavelengths is None and not 0 < base < math.inf:
            raise ValueError(f"[RoPE] 'base' must be a positive number but got {base}.")
        self._dims = dims
        self._is_interleaved = is_interleaved
        self._attention_factor = attention_factor
        # Underscored: no parameters.
        self._wavelengths = rope_wavelengths(dims, base) if wavelengths is None else wavelengths

    @property
    def wavelengths(self) -> mx.array | None:
        """Positions per radian of each pair, `(K / 2,)`; `None` where they depend on the position."""
        wavelengths: mx.array = self["_wavelengths"]
        return wavelengths

    @property
    def is_interleaved(self) -> bool:
        return self._is_interleaved

    @property
    def attention_factor(self) -> float:
        """What rotated queries and keys are to be multiplied by."""
        return self._attention_factor

    def rotation(self, offset: int | mx.array, length: int) -> Any:
        """What `rotate` needs for `length` tokens; layers that share the positions share it.

        Args:
            offset: As in a call.
            length: Number of tokens.
        """
        return offset

    def rotate(self, x: mx.array, rotation: Any) -> mx.array:
        """`x`, `(B, H, L, K)`, rotated as `rotation` has it."""
        offset: int | mx.array = rotation
        if isinstance(offset, mx.array) and offset.ndim == 2:
            # rows of one token
            tokens = x.swapaxes(1, 2)
            rows = tokens.reshape(-1, *tokens.shape[2:])[:, :, None]
            return self.rotate(rows, offset.reshape(-1)).reshape(tokens.shape).swapaxes(1, 2)
        return mx.fast.rope(
            x,
            self._dims,
            traditional=self._is_interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._wavelengths,
        )

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return self.rotate(x, self.rotation(offset, x.shape[2]))


class DynamicRoPE(RoPE):
    r"""RoPE whose base grows with the text beyond the trained length ("dynamic NTK").

    .. math::
        \theta = p / \lambda_i(p + 1)

    with the wavelengths of `dynamic_wavelengths` for the text up to and including position p. A
    query and a key are each rotated once, with the base of the moment when their token was read, as
    transformers does that reads token by token; cached keys keep their rotation. So a text gives the
    same whole, in pieces or token by token. transformers rotates a prompt longer than the trained
    length as a whole with the base of its end, which no earlier token can know, and differs there.

    Source: the dynamic scaling of `transformers`, for the embedding of Su et al., arXiv 2104.09864.

    Args:
        dims: Head dims `K`, even and more than 2.
        base: Base of the wavelengths in training.
        factor: Stretching factor `f`.
        trained_length: The longest text of training.
        is_interleaved: As in `RoPE`.

    Shape: as `RoPE`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: The dims are odd or below 4, or the base or a factor is out of its bounds.

    Example:
        >>> DynamicRoPE(8, factor=2.0, trained_length=4)(mx.ones((1, 2, 3, 8)), offset=5).shape
        (1, 2, 3, 8)
    """

    def __init__(
        self,
        dims: int,
        *,
        base: float = 10000.0,
        factor: float,
        trained_length: int,
        is_interleaved: bool = False,
    ):
        super().__init__(dims, base=base, is_interleaved=is_interleaved)
        if dims < 4:
            raise ValueError(f"[DynamicRoPE] 'dims' must be at least 4 but got {dims}.")
        check_sizes("DynamicRoPE", trained_length=trained_length)
        if not 1 <= factor < math.inf:
            raise ValueError(f"[DynamicRoPE] 'factor' must be a number from 1 but got {factor}.")
        self._base = base
        self._factor = factor
        self._trained_length = trained_length

    @property
    def wavelengths(self) -> mx.array | None:
        return None

    def rotation(self, offset: int | mx.array, length: int) -> tuple[mx.array, mx.array]:
        """Cosines and sines, float32 `(L, K / 2)`, or `(B, 1, L, K / 2)` where rows differ."""
        position = mx.array(offset)
        if position.ndim < 2:
            position = position[..., None] + mx.arange(length)
        wavelengths = dynamic_wavelengths(
            self._dims,
            self._base,
            factor=self._factor,
            trained_length=self._trained_length,
            length=position + 1,
        )
        angle = position[..., None] / wavelengths
        angle = angle[:, None] if angle.ndim == 3 else angle
        return mx.cos(angle), mx.sin(angle)

    def rotate(self, x: mx.array, rotation: tuple[mx.array, mx.array]) -> mx.array:
        cos, sin = rotation
        pairs = x.astype(mx.float32).reshape(
            *x.shape[:-1], *((-1, 2) if self._is_interleaved else (2, -1))
        )
        axis = -1 if self._is_interleaved else -2
        a, b = (part.squeeze(axis) for part in mx.split(pairs, 2, axis=axis))
        rotated = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=axis)
        return rotated.reshape(x.shape).astype(x.dtype)
