"""FNet: tokens mixed by the Fourier transform (Lee-Thorp et al., arXiv 2105.03824)."""

import math
from typing import Any, ClassVar

import mlx.core as mx

from ..layers.arguments import check_sequences, check_sizes
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.mixer import Linears, TokenMixer


class FNet(TokenMixer):
    r"""The real part of the Fourier transform over tokens and dims, without parameters.

    .. math::
        y_{t,d} = \mathrm{Re} \sum_{s<L} \sum_{e<D}
        x_{s,e}\,e^{-2 \pi i (t s / L + d e / D)}

    It is not normalised, so that results grow with :math:`\sqrt{L D}`, and it is not the product of two
    real parts. It takes `L` as the number of real tokens: padding that is marked by `valid` changes
    nothing. The published models were trained with padding that takes part; leave `valid` out for them.
    A call with `valid` multiplies by a matrix for each row, in `T^2 D`.

    Source: Lee-Thorp et al., arXiv 2105.03824.

    Args:
        dims: Model dims `D`.
        linear: As other mixers take it; there is no projection.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `()`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> FNet(32)(mx.zeros((1, 5, 32)))[0].shape
        (1, 5, 32)
    """

    equation: ClassVar[str] = "Y = Re(FFT_T(FFT_D(X)))"
    complexity: ClassVar[str] = "T D log(T D)"
    paper: ClassVar[str] = "arXiv 2105.03824"
    bidirectional: ClassVar[bool] = True

    def __init__(self, dims: int, *, linear: Linears = Linear):
        super().__init__()
        check_sizes("FNet", dims=dims)
        self._dims = dims

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def mix(self, x: mx.array, state: tuple[()], context: Context) -> tuple[mx.array, tuple[()]]:
        if not x.size:
            return x, ()
        valid = context.valid
        if valid is None:
            return mx.fft.fft2(x.astype(mx.float32), axes=(1, 2)).real.astype(x.dtype), ()
        shown = mx.where(valid[..., None], x.astype(mx.float32), 0.0)
        over_dims = mx.fft.fft(shown, axis=2)
        position = mx.maximum(mx.cumsum(valid.astype(mx.int64), axis=1) - 1, 0)
        count = mx.maximum(position[:, -1:] + 1, 1)[..., None]
        angles = _angles(position, count)
        y = mx.cos(angles) @ over_dims.real + mx.sin(angles) @ over_dims.imag
        return mx.where(valid[..., None], y, 0.0).astype(x.dtype), ()

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        """Mixing weights of the real and imaginary parts of the transform over dims, `(B, 2, L, L)`."""
        check_sequences("FNet", x, self._dims)
        batch, length, _ = x.shape
        angles = _angles(mx.arange(length, dtype=mx.int64)[None], mx.array(length))
        both = mx.stack([mx.cos(angles), mx.sin(angles)], axis=1)
        return mx.broadcast_to(both, (batch, *both.shape[1:]))


def _angles(position: mx.array, count: mx.array) -> mx.array:
    """The angles between positions `(B, L)` of sequences of so many tokens, float32 `(B, L, L)`."""
    # integers, since the angle of a large product would be rounded
    turns = (position[:, :, None] * position[:, None]) % count
    return turns.astype(mx.float32) * (2 * math.pi / count.astype(mx.float32))
