"""How attention tells positions apart: rotations, terms of scores, and codes that are added."""

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..arguments import check_sizes
from ..context import Context, count_on
from ..embedding import embed_tokens
from ..mixer import Group, TokenMixer, part_of


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
    weight = (waves_per_text - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return _blended(wavelengths, factor, weight)


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
    r"""YaRN's factor of rotated queries and keys, :math:`1 + 0.1\,w \ln f`, 1 for `f <= 1`."""
    return 1.0 if factor <= 1.0 else 1.0 + 0.1 * weight * math.log(factor)


def _blended(wavelengths: mx.array, factor: float, weight: mx.array) -> mx.array:
    """A mean of stretched and, by `weight`, unchanged frequencies.

    The ends stay exact, since positions multiply errors.
    """
    stretched = factor * wavelengths
    mean = 1.0 / ((1.0 - weight) / stretched + weight / wavelengths)
    return mx.where(weight >= 1.0, wavelengths, mx.where(weight <= 0.0, stretched, mean))


class RoPE(nn.Module):
    r"""Rotates pairs of each head's dims by angles proportional to the position.

    .. math::
        (a, b) \mapsto (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta), \quad
        \theta = p / \lambda_i

    Source: Su et al., arXiv 2104.09864.

    Args:
        dims: Head dims `K`, even.
        base: Base of the wavelengths.
        wavelengths: Positions per radian of each pair, `(K / 2,)`, instead of the ones from `base`.
        is_interleaved: Pairs are neighbours `(2i, 2i + 1)`, as in the original Llama, instead of
            halves `(i, i + K / 2)`, as in checkpoints of the Hub.
        attention_factor: What YaRN multiplies rotated queries and keys by. `scaled` multiplies queries
            by the square instead, so that a state holds plain keys.

    Attributes:
        wavelengths: Positions per radian of each pair; `None` where they depend on the position.
        is_interleaved: Whether pairs are neighbours.
        query_scale: What `scaled` multiplies queries by, the square of `attention_factor`.

    Shape:
        `x` and result `(B, H, L, K)`, or with more dims than `K`, of which the first are rotated;
        `offset`: the position of the first token, a number or `(B,)`, or of each token, `(B, L)`.

    Raises:
        TypeError: The dims are not an integer.
        ValueError: The dims are not even, or the base is not positive.

    Example:
        >>> RoPE(8)(mx.ones((1, 2, 3, 8)), offset=5).shape
        (1, 2, 3, 8)
    """

    wavelengths: mx.array | None

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
        self.is_interleaved = is_interleaved
        self.query_scale = attention_factor**2
        waves = rope_wavelengths(dims, base) if wavelengths is None else wavelengths
        # lazy arrays cannot be computed in another thread than the one that made them
        mx.eval(waves)
        # an ordinary attribute, since items of a module are parameters
        object.__setattr__(self, "wavelengths", waves)

    def scaled(self, queries: mx.array) -> mx.array:
        """Queries `(..., K)`, of which the dims that are rotated are multiplied by `query_scale`."""
        if self.query_scale == 1.0:
            return queries
        rotated, *others = mx.split(queries, [self._dims], axis=-1)
        return mx.concatenate([rotated * self.query_scale, *others], axis=-1)

    def rotation(self, offset: int | mx.array, length: int) -> Any:
        """The table of `rotate` for `length` tokens, which layers with the same positions share.

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
            traditional=self.is_interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self.wavelengths,
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
    same whole, in chunks or token by token. transformers rotates a prompt longer than the trained
    length as a whole with the base of its end, which no earlier token can know, and differs there.

    Source: the dynamic scaling of `transformers`, for the embedding of Su et al., arXiv 2104.09864.

    Args:
        dims: Head dims `K`, even and more than 2.
        base: Base of the wavelengths in training.
        factor: Stretching factor `f`.
        trained_length: The longest text of training.
        is_interleaved: Pairs are neighbours `(2i, 2i + 1)` instead of halves `(i, i + K / 2)`.

    Shape:
        `x` and result `(B, H, L, K)`, or with more dims than `K`, of which the first are rotated;
        `offset`: the position of the first token, a number or `(B,)`, or of each token, `(B, L)`.

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
        object.__setattr__(self, "wavelengths", None)

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
        first, others = mx.split(x, [self._dims], axis=-1)
        pairs = first.astype(mx.float32).reshape(
            *first.shape[:-1], *((-1, 2) if self.is_interleaved else (2, -1))
        )
        axis = -1 if self.is_interleaved else -2
        a, b = (part.squeeze(axis) for part in mx.split(pairs, 2, axis=axis))
        rotated = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=axis)
        return mx.concatenate([rotated.reshape(first.shape).astype(x.dtype), others], axis=-1)


class PositionBias(nn.Module):
    """A term that each head adds to the score of a query and a key, by their distance.

    Attention takes one as `position_bias=` and asks it for the positions that it sees.

    Shape:
        Integers `(B, L, N)`, the position of the key less the query's; result float32
        `(B, H, L, N)`.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        check_sizes(type(self).__name__, num_heads=num_heads)
        self._num_heads = num_heads

    def check_fits(self, caller: str, num_heads: int) -> None:
        """Refuses attention of another number of heads, with `ValueError`."""
        if num_heads != self._num_heads:
            raise ValueError(
                f"[{caller}] 'position_bias' must be made for {num_heads} heads but got one for "
                f"{self._num_heads}."
            )

    def part(self, group: Group) -> "PositionBias":
        """That of this process' share of the heads."""
        part = copy(self)
        part._num_heads //= group.size()
        return part

    def __call__(self, relative: mx.array) -> mx.array:
        raise NotImplementedError


class ALiBi(PositionBias):
    r"""Attention with linear biases (Press et al., arXiv 2108.12409).

    .. math::
        b_{t,j,h} = -m_h\,|t - j|, \quad m_h = 2^{-8h/H}, \quad h = 1..H

    Where H is no power of 2, the largest power below it has these slopes, and the heads beyond take
    every second one of twice as many heads, as the published code and BLOOM do. BLOOM adds
    :math:`m_h\,j` instead, which gives the same weights under a causal mask.

    Args:
        num_heads: Query heads `H`.

    Shape: as `PositionBias`.

    Example:
        >>> ALiBi(4)(mx.array([[[-2, -1, 0]]]))[0, 0].tolist()
        [[-0.5, -0.25, -0.0]]
    """

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        known = 2 ** int(math.log2(num_heads))
        slopes = _slopes(known) + _slopes(2 * known)[::2]
        # underscored: no parameter
        self._slopes = mx.array(slopes[:num_heads])

    def part(self, group: Group) -> "ALiBi":
        part = cast(ALiBi, super().part(group))
        part._slopes = part_of(self._slopes, group)
        return part

    def __call__(self, relative: mx.array) -> mx.array:
        return -self._slopes[:, None, None] * mx.abs(relative)[:, None].astype(mx.float32)


def _slopes(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1)]


class RelativeBias(PositionBias):
    r"""A learned term for each bucket of distances (T5, Raffel et al., arXiv 1910.10683).

    Of R buckets for one direction, the first R/2 hold a distance each. The others hold ever more, on a
    logarithmic scale up to `max_distance`; all that is farther falls into the last. If attention sees
    both sides, each side has half of the buckets.

    Args:
        num_heads: Query heads `H`.
        num_buckets: The buckets of both directions together.
        max_distance: The distance from which all fall into the last bucket.
        is_causal: Keys after the query share the bucket of distance 0.

    Shape: as `PositionBias`.

    Example:
        >>> RelativeBias(4)(mx.array([[[-2, -1, 0]]])).shape
        (1, 4, 1, 3)
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        is_causal: bool = True,
    ):
        super().__init__(num_heads)
        check_sizes("RelativeBias", num_buckets=num_buckets, max_distance=max_distance)
        sides = 1 if is_causal else 2
        if num_buckets % (2 * sides):
            raise ValueError(
                f"[RelativeBias] 'num_buckets' must be a multiple of {2 * sides} but got "
                f"{num_buckets}."
            )
        side = num_buckets // sides
        if max_distance <= side // 2:
            raise ValueError(
                f"[RelativeBias] 'max_distance' must be larger than {side // 2}, the distances with a "
                f"bucket of their own, but got {max_distance}."
            )
        self._is_causal = is_causal
        self._side = side
        # a table, so that no device's logarithm puts a distance into the bucket beside
        self._buckets = mx.array(_buckets(side, max_distance))
        self.weight = mx.random.normal((num_buckets, num_heads)) * 0.02

    def part(self, group: Group) -> "RelativeBias":
        part = cast(RelativeBias, super().part(group))
        part.weight = part_of(self.weight, group, axis=-1)
        return part

    def __call__(self, relative: mx.array) -> mx.array:
        distance = mx.maximum(-relative, 0) if self._is_causal else mx.abs(relative)
        bucket = self._buckets[mx.minimum(distance, self._buckets.size - 1)]
        if not self._is_causal:
            bucket = bucket + mx.where(relative > 0, self._side, 0)
        return mx.moveaxis(self.weight[bucket].astype(mx.float32), -1, 1)


def _buckets(count: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance from 0 to `max_distance`."""
    exact = count // 2
    distance = np.arange(max_distance + 1)
    share = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    # a share that is a whole number but for rounding belongs to the bucket that begins there
    far = exact + np.floor(share * (count - exact) + 1e-9).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(far, count - 1)).astype(np.int32)


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
        columns = positions[..., None].astype(mx.float32)
        turns = columns * self._coarse
        angles = 2 * math.pi * (turns - mx.floor(turns) + columns * self._fine)
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
        rows = positions + self._offset
        count = self.rows.weight.shape[0]
        codes = embed_tokens(self.rows, mx.minimum(rows, count - 1))
        return mx.where((rows < count)[..., None], codes, mx.array(mx.nan, codes.dtype))


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


class AddedPositionsState(NamedTuple):
    """The state of `AddedPositions`: how many tokens of each row were read, int32 `(B,)`."""

    read: mx.array


class AddedPositions(TokenMixer):
    r"""Adds a code of its position to each token, :math:`y_t = P_{p(t)}`.

    It follows the interface of token mixers, since it too needs to know what was read before. Padding
    counts for no position, and a sample that begins in a row begins at position 0.

    Args:
        dims: Model dims `D`.
        code: Maps positions, integers `(B, L)`, to `(B, L, D)`.
        scale: What the residual stream is multiplied by before.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `AddedPositionsState`.
    """

    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    def __init__(self, dims: int, code: nn.Module, *, scale: float = 1.0):
        super().__init__()
        self._dims = dims
        self._scale = scale
        self.code = code

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> AddedPositionsState:
        return AddedPositionsState(mx.zeros((batch_size,), mx.int32))

    def mix(
        self, x: mx.array, state: AddedPositionsState, context: Context
    ) -> tuple[mx.array, AddedPositionsState]:
        in_sample, read = count_on(state.read, x.shape[1], context)
        return self.code(in_sample).astype(x.dtype), AddedPositionsState(read)

    def added(
        self, x: mx.array, state: AddedPositionsState | None, context: Context
    ) -> tuple[mx.array, AddedPositionsState]:
        """The residual stream `(B, L, D)` with positions, and the state."""
        residual = x if self._scale == 1 else x * self._scale
        y, state = self(x, state, context=context)
        return residual + y, state
