"""Heads of projected tokens, with queries and keys in rotary position embedding (arXiv 2104.09864)."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from .backend.cost import Call, Cost, work
from .backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel


class Rotation(NamedTuple):
    r"""Angles :math:`\theta = p / \lambda_i` of rotary position embedding, which layers share.

    Attributes:
        offset: The position :math:`p` of the first token, a number or `(B,)`, or of each, `(B, L)`.
        wavelengths: Positions per radian of each pair :math:`\lambda_i`, float32 `(K / 2,)`.
        cosines: Of the angles, float32 `(1 or B, L, K / 2)`.
        sines: Of the angles, float32 `(1 or B, L, K / 2)`.

    Example:
        >>> rotation = Rotation.of(5, 3, mx.array([1.0, 100.0]))
        >>> rotation.cosines.shape
        (1, 3, 2)
    """

    offset: int | mx.array
    wavelengths: mx.array
    cosines: mx.array
    sines: mx.array

    @classmethod
    def of(cls, offset: int | mx.array, length: int, wavelengths: mx.array) -> "Rotation":
        """The angles of `length` tokens. They get no gradient."""
        positions = mx.array(offset)
        if positions.ndim < 2:
            positions = positions.reshape(-1, 1) + mx.arange(length)
        # as MLX has it, so that the last bits of large angles agree
        angles = positions.astype(mx.float32)[..., None] * mx.reciprocal(wavelengths)
        angles = mx.stop_gradient(angles)
        return cls(offset, wavelengths, mx.cos(angles), mx.sin(angles))


def rotated_heads(
    projected: mx.array,
    rotation: Rotation,
    *,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    r"""Splits projected tokens into heads, and rotates pairs of each query and key.

    .. math::
        (a, b) \mapsto (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta)

    Source: rotary position embedding (Su et al., arXiv 2104.09864).

    Args:
        projected: Heads of queries, keys and values, one after the other, `(B, L, (H + 2G) K)`, any
            float dtype, `K` even.
        rotation: The angles :math:`\theta` of these tokens.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`.
        is_interleaved: Pairs are neighbours `(2i, 2i + 1)` instead of halves `(i, i + K / 2)`.

    Returns:
        Queries `(B, H, L, K)`, keys and values `(B, G, L, K)` in the dtype of `projected`.

    Raises:
        ValueError: The shapes do not agree, or there are no heads.

    Example:
        >>> rotation = Rotation.of(0, 3, mx.array([1.0, 100.0]))
        >>> heads = rotated_heads(mx.ones((1, 3, 16)), rotation, num_heads=2, num_kv_heads=1)
        >>> [part.shape for part in heads]
        [(1, 2, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4)]
    """
    count, dims = num_heads + 2 * num_kv_heads, 2 * rotation.wavelengths.size
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads < 1:
            raise ValueError(f"[rotated_heads] '{name}' must be positive but got {heads}.")
    if projected.ndim != 3 or projected.shape[2] != count * dims or not dims:
        raise ValueError(
            "[rotated_heads] 'projected' must be (B, L, (H + 2G) K) with K > 0 but has shape "
            f"{projected.shape} for {num_heads} and {num_kv_heads} heads of {dims} dims."
        )
    batch, length = projected.shape[:2]
    if projected.size == 0:
        queries = mx.zeros((batch, num_heads, length, dims), projected.dtype)
        keys = mx.zeros((batch, num_kv_heads, length, dims), projected.dtype)
        return queries, keys, keys
    turned: tuple[mx.array, mx.array, mx.array] = operation(
        projected, rotation, num_heads, num_kv_heads, is_interleaved
    )
    return turned


def _reference(
    projected: mx.array,
    rotation: Rotation,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    """The definition in plain float32 operations."""
    cosines, sines = rotation.cosines, rotation.sines
    queries, keys, values = _split(projected, num_heads, num_kv_heads)
    turned = [_rotate(x, cosines, sines, is_interleaved) for x in (queries, keys)]
    return turned[0], turned[1], values


def _split(
    projected: mx.array, num_heads: int, num_kv_heads: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of projected tokens."""
    count = num_heads + num_kv_heads
    tokens = mx.unflatten(projected, -1, (count + num_kv_heads, -1))
    queries, keys, values = mx.split(tokens.swapaxes(1, 2), [num_heads, count], axis=1)
    return queries, keys, values


def _rotate(x: mx.array, cosines: mx.array, sines: mx.array, is_interleaved: bool) -> mx.array:
    """Heads `(B, heads, L, K)`, rotated."""
    parts = x.astype(mx.float32).reshape(*x.shape[:-1], *((-1, 2) if is_interleaved else (2, -1)))
    axis = -1 if is_interleaved else -2
    a, b = (part.squeeze(axis) for part in mx.split(parts, 2, axis=axis))
    cosines, sines = cosines[:, None], sines[:, None]
    turned = mx.stack([a * cosines - b * sines, a * sines + b * cosines], axis=axis)
    return turned.reshape(x.shape).astype(x.dtype)


def _of_mlx(
    projected: mx.array,
    rotation: Rotation,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    """MLX's own kernels of a GPU. Queries and keys are rotated at once."""
    (batch, length), count = projected.shape[:2], num_heads + num_kv_heads
    offset = rotation.offset
    tokens = mx.unflatten(projected, -1, (count + num_kv_heads, -1))
    both, values = mx.split(tokens.swapaxes(1, 2), [count], axis=1)
    rotate = partial(
        mx.fast.rope,
        dims=tokens.shape[3],
        traditional=is_interleaved,
        base=None,
        scale=1.0,
        freqs=rotation.wavelengths,
    )
    if isinstance(offset, mx.array) and offset.ndim == 2:
        # rows of one token
        rows = both.swapaxes(1, 2).reshape(batch * length, count, 1, -1)
        turned = rotate(rows, offset=mx.broadcast_to(offset, (batch, length)).reshape(-1))
        both = turned.reshape(batch, length, count, -1).swapaxes(1, 2)
    else:
        both = rotate(both, offset=offset)
    queries, keys = mx.split(both, [num_heads], axis=1)
    return queries, keys, values


def _native(
    projected: mx.array,
    rotation: Rotation,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    """One pass in C++. Its gradient is a kernel too.

    MLX makes the rotation and its gradient of plain operations on a CPU, and copies heads into place.
    """
    heads: tuple[mx.array, mx.array, mx.array] = _kernel()(
        projected, rotation.cosines, rotation.sines, num_heads, num_kv_heads, is_interleaved
    )
    return heads


def _unsupported(projected: mx.array, *others: Any) -> str | None:
    return None if projected.dtype in FLOATS else f"'projected' is {projected.dtype}"


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    queries, keys, values, cosines, sines = arrays
    turned = [_rotate(x, cosines, -sines, options[2]) for x in (queries, keys)]
    tokens = mx.concatenate([*turned, values], axis=1).swapaxes(1, 2)
    return [mx.flatten(tokens, 2)]


def _cost(call: Call) -> Cost:
    projected = call.inputs[0]
    queries, groups, _ = call.options
    turned = projected.size * (queries + groups) // (queries + 2 * groups)
    return Cost(work(multiply=2 * turned, add=turned))


def _examples() -> Iterator[Example]:
    rotation = Rotation.of(0, 2, mx.ones((4,)))
    for dtype, is_interleaved in product(FLOATS, (False, True)):
        yield Example((mx.zeros((1, 2, 32), dtype), rotation, 2, 1, is_interleaved))


_kernel = native_kernel("rotated_heads", _gradient)
operation = Operation(
    "rotated_heads",
    _examples,
    costs={"RotatedHeads": _cost},
    metal=_of_mlx,
    cuda=_of_mlx,
    native=Backend(_native, _unsupported, refuses=True),
    reference=_reference,
)
