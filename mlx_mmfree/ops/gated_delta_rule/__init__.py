"""The delta rule: a state for each head that forgets what it holds under a key before it writes."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import mlx.core as mx

from ..backend.cost import Call, Cost, meeting, work
from ..backend.dispatch import Arrays, Backend, Example, Operation, native_kernel
from ..gated_linear_attention import check_heads
from .definition import Inputs, chunked, reference
from .metal import metal, unsupported


def gated_delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    beta: mx.array | None,
    f: mx.array | None,
    state: mx.array,
    *,
    removal: tuple[mx.array, mx.array] | None = None,
    valid: mx.array | None = None,
    starts: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    r"""Runs a linear recurrence that replaces what its state holds under a key, and reads from it.

    .. math::
        \bar S_t = \mathrm{diag}(f_t)\,S_{t-1}, \qquad
        S_t = \bar S_t + \beta_t\,k_t\,(v_t - \bar S_t^\top k_t)^\top, \qquad o_t = S_t^\top q_t

    With `removal`, vectors :math:`(a_t, b_t)` of its own say what is forgotten, and the state is read
    before it decays:

    .. math::
        S_t = \mathrm{diag}(f_t)\,S_{t-1} - b_t\,(S_{t-1}^\top a_t)^\top + \beta_t\,k_t\,v_t^\top

    Computed in float32, with nothing scaled or normalised: keys of length 1 and :math:`\beta_t` of 0 to
    2 keep the state bounded. Gates lie in 0 to 1 and may be 0: products of gates are formed as such, so
    that nothing is divided and no logarithm is taken. Sources: arXiv 2406.06484 eq. 2 (no gate),
    2412.06464 eq. 10 (one for each head), 2510.26692 eq. 1 (one for each key channel), and 2503.14456
    eq. 17 (`removal`).

    Args:
        q: Queries `(B, H, L, K)`, any float dtype.
        k: Keys, of the same shape.
        v: Values `(B, H, L, V)`.
        beta: How much is replaced, `(B, H, L, 1)`; `None` stands for ones.
        f: Gates, `(B, H, L, K)` or one for each head `(B, H, L, 1)`; `None` stands for ones.
        state: :math:`S_0`, float32 `(B, H, K, V)`.
        removal: :math:`a` and :math:`b`, both `(B, H, L, K)`.
        valid: Booleans `(B, L)`. Where one is `False`, the state stays as it is.
        starts: Booleans `(B, L)`. Where one is `True` and the position is valid, the state before it
            counts as zero.

    Returns:
        `o`, `(B, H, L, V)` in the dtype of `v`, and the last state, float32 `(B, H, K, V)`.

    Raises:
        ValueError: The shapes do not agree.

    Example:
        >>> q = k = mx.ones((1, 1, 3, 1))
        >>> v = mx.array([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
        >>> o, state = gated_delta_rule(q, k, v, 0.5 * q, None, mx.zeros((1, 1, 1, 1)))
        >>> o.flatten().tolist(), state.item()
        ([0.5, 1.25, 2.125], 2.125)
    """
    check_heads("gated_delta_rule", q, k, v, f, state)
    heads = (*q.shape[:3], 1)
    if beta is not None and beta.shape != heads:
        raise ValueError(f"[gated_delta_rule] 'beta' must have shape {heads} but got {beta.shape}.")
    if removal is not None and any(x.shape != q.shape for x in removal):
        shapes = " and ".join(str(x.shape) for x in removal)
        raise ValueError(
            f"[gated_delta_rule] 'removal' must be two arrays of shape {q.shape} but got {shapes}."
        )
    dtype = v.dtype
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    f = mx.ones((*v.shape[:3], 1)) if f is None else f.astype(mx.float32)
    written = k if beta is None else beta.astype(mx.float32) * k
    if removal is None:
        # the decayed state under a key is the state before under the key times its gates
        a, b = f * k, None
    else:
        a, b = (x.astype(mx.float32) for x in removal)
    if valid is not None:
        mask, none = valid[:, None, :, None], mx.zeros(())
        written, v, a = (mx.where(mask, x, none) for x in (written, v, a))
        b = None if b is None else mx.where(mask, b, none)
        f = mx.where(mask, f, mx.ones(()))
        starts = None if starts is None else mx.logical_and(starts, valid)
    if starts is not None:
        begins, none = starts[:, None, :, None], mx.zeros(())
        f, a = mx.where(begins, none, f), mx.where(begins, none, a)
    if q.size == 0 or v.size == 0:
        return mx.zeros(v.shape, dtype), state.astype(mx.float32)
    inputs = [q, written, v, a, f, state.astype(mx.float32), *([] if b is None else [b])]
    o, last = _operation(*inputs)
    return o.astype(dtype), last


def led_by_delta_rule(
    q: mx.array, written: mx.array, v: mx.array, read: mx.array, f: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`gated_delta_rule` of what `delta_rule_inputs` returns: keys times what they are multiplied by."""
    if q.size == 0 or v.size == 0:
        return mx.zeros(v.shape), state
    o, last = _operation(q, written, v, read, f, state)
    return o, last


def native(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    """C++, some columns of a state in the cache, and its gradient."""
    o, last = _kernel()(*Inputs(*arrays))
    return o, last


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    *given, d_o, d_last, b = arrays

    def definition(*given: mx.array) -> list[mx.array]:
        return list(reference(*given))

    given = given if b is None else [*given, b]
    gradients: list[mx.array] = mx.vjp(definition, given, [d_o, d_last])[1]
    return gradients


def _cost(call: Call) -> Cost:
    q, _, v, _, _, _, removed = call.arguments
    batch, heads, length, dims = q.shape
    value_dims = v.shape[3]
    steps = batch * heads * length
    size = steps * dims * value_dims
    found, answered = (meeting(1, dims, value_dims, steps, (read, 5)) for read in (3, 0))
    # the state decays, and what is new is added
    total = found.work + answered.work + work(multiply=2 * size, add=size)
    total += work(add=v.size) if removed is None else work(multiply=size, add=size)
    return Cost(total, (found, answered))


def _examples() -> Iterator[Example]:
    # rows of a state in whole segments or not, and columns four to a lane or one
    for length, keys, values in product((1, 65), (32, 20), (128, 32)):
        x, v = mx.zeros((1, 1, length, keys)), mx.zeros((1, 1, length, values))
        state = mx.zeros((1, 1, keys, values))
        for width, has_removal in product((1, keys), (False, True)):
            f = mx.ones((1, 1, length, width))
            yield Example((x, x, v, x, f, state, *([x] if has_removal else [])))


_kernel = native_kernel("gated_delta_rule", _gradient)
_operation = Operation(
    "gated_delta_rule",
    _examples,
    costs={"GatedDeltaRule": _cost},
    metal=Backend(metal, unsupported),
    native=native,
    chunked=chunked,
    reference=reference,
)
