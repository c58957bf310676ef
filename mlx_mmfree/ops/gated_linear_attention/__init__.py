"""The gated recurrence with a matrix for each head: linear attention, RetNet, GLA and HGRN2."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import mlx.core as mx

from ..backend.cost import Call, Cost, meeting, work
from ..backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel
from .definition import chunked, reference
from .metal import metal, unsupported


def gated_linear_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    f: mx.array | None,
    state: mx.array,
    *,
    valid: mx.array | None = None,
    starts: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    r"""Runs a linear recurrence whose state is a matrix, and reads from it.

    .. math::
        S_t = \mathrm{diag}(f_t)\,S_{t-1} + k_t^\top v_t, \qquad o_t = q_t\,S_t

    Computed in float32, with nothing scaled or normalised. Gates lie in 0 to 1 and may be 0: products of
    gates are formed as such, over no more than a chunk of positions, so that nothing is divided, no
    logarithm is taken and nothing overflows at any length. Sources: arXiv 2006.16236 eq. 12 (no gate),
    2307.08621 eq. 6 (one for each head), 2312.06635 eq. 3 (one for each key channel).

    Args:
        q: Queries `(B, H, L, K)`, any float dtype.
        k: Keys, of the same shape.
        v: Values `(B, H, L, V)`.
        f: Gates, `(B, H, L, K)` or one for each head `(B, H, L, 1)`; `None` stands for ones.
        state: :math:`S_0`, float32 `(B, H, K, V)`.
        valid: Booleans `(B, L)`. Where one is `False`, the state stays as it is.
        starts: Booleans `(B, L)`. Where one is `True` and the position is valid, the state before it
            counts as zero.

    Returns:
        `o`, `(B, H, L, V)` in the dtype of `v`, and the last state, float32 `(B, H, K, V)`.

    Raises:
        ValueError: The shapes do not agree.

    Example:
        >>> q = k = v = mx.ones((1, 1, 3, 1))
        >>> o, state = gated_linear_attention(q, k, v, 0.5 * q, mx.zeros((1, 1, 1, 1)))
        >>> o.flatten().tolist(), state.item()
        ([1.0, 1.5, 1.75], 1.75)
    """
    check_heads("gated_linear_attention", q, k, v, f, state)
    if valid is not None:
        mask = valid[:, None, :, None]
        k, v = (mx.where(mask, x, mx.zeros((), x.dtype)) for x in (k, v))
        starts = None if starts is None else mx.logical_and(starts, valid)
        f = None if f is None else mx.where(mask, f, mx.ones((), f.dtype))
    if starts is not None:
        gates = mx.ones((*v.shape[:3], 1)) if f is None else f
        f = mx.where(starts[:, None, :, None], mx.zeros((), gates.dtype), gates)
    if q.size == 0 or v.size == 0:
        return mx.zeros(v.shape, v.dtype), state.astype(mx.float32)
    o, last = _operation(q, k, v, f, state)
    return o, last


def check_heads(
    caller: str, q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> None:
    """Checks heads, their gates and their state.

    Raises:
        ValueError: A shape does not fit. The message names the caller.
    """
    fits = q.ndim == v.ndim == 4 and k.shape == q.shape and v.shape[:3] == q.shape[:3]
    if not fits or state.shape != (*q.shape[:2], q.shape[3], v.shape[3]):
        raise ValueError(
            f"[{caller}] 'q', 'k', 'v' and 'state' must have shapes (B, H, L, K), (B, H, L, K), "
            f"(B, H, L, V) and (B, H, K, V) but got {q.shape}, {k.shape}, {v.shape} and {state.shape}."
        )
    heads = (*q.shape[:3], 1)
    if f is not None and f.shape not in (q.shape, heads):
        raise ValueError(f"[{caller}] 'f' must have shape {q.shape} or {heads} but got {f.shape}.")


def native(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    """C++, chunk by chunk in the cache, and its gradient."""
    arrays = (None if x is None else x.astype(mx.float32) for x in (q, k, v, f, state))
    o, last = _kernel()(*arrays)
    return o.astype(v.dtype), last


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    q, k, v, state, d_o, d_last, f = arrays

    def definition(
        q: mx.array, k: mx.array, v: mx.array, state: mx.array, *f: mx.array
    ) -> list[mx.array]:
        return list(reference(q, k, v, f[0] if f else None, state))

    given = [x for x in (q, k, v, state, f) if x is not None]
    gradients: list[mx.array] = mx.vjp(definition, given, [d_o, d_last])[1]
    return gradients


def _cost(call: Call) -> Cost:
    q, _, v, _, gates = call.arguments
    batch, heads, length, dims = q.shape
    value_dims = v.shape[3]
    steps = batch * heads * length
    size = steps * dims * value_dims
    answered = meeting(1, dims, value_dims, steps, (0, 3))
    total = answered.work + work(multiply=size if gates is None else 2 * size, add=size)
    return Cost(total, (answered,))


def _examples() -> Iterator[Example]:
    for length, width, dtype in product((1, 65), (None, 1, 32), FLOATS):
        x = mx.zeros((1, 1, length, 32), dtype)
        f = None if width is None else mx.ones((1, 1, length, width), dtype)
        yield Example((x, x, x, f, mx.zeros((1, 1, 32, 32))))


_kernel = native_kernel("gated_linear_attention", _gradient)
_operation = Operation(
    "gated_linear_attention",
    _examples,
    costs={"GatedLinearAttention": _cost},
    metal=Backend(metal, unsupported),
    native=native,
    chunked=chunked,
    reference=reference,
)
