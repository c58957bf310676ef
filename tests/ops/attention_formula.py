"""Attention and its gradient in float64, and what compares a backend with them."""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mmfree.ops import attention, use_backend
from mlx_mmfree.ops.attention import Mask
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

Arrays = list[np.ndarray]


class Sizes(NamedTuple):
    """Numbers of what attention is computed of."""

    length: int
    count: int
    dims: int = 64
    value_dims: int = 64
    batch: int = 1
    heads: int = 1
    groups: int = 1

    @property
    def scores(self) -> tuple[int, ...]:
        return self.batch, 1, self.length, self.count


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Results and weights, whose rows are 0 for queries that see nothing."""
    shared = q.shape[1] // k.shape[1]
    scores = q @ np.repeat(k, shared, axis=1).swapaxes(-1, -2) * q.shape[3] ** -0.5
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True, initial=-1e300)
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None, None])
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - largest)
    weights = weights / np.where(total == 0, 1, total)
    return weights @ np.repeat(v, shared, axis=1), weights


def gradients_by_formula(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray,
    sinks: np.ndarray | None,
    given: np.ndarray,
) -> Arrays:
    """Gradients of `sum(given * result)`, to which queries that see nothing add nothing."""
    y, weights = attended(q, k, v, seen, sinks)
    groups, shared, scale = k.shape[1], q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    rows = (given * y).sum(axis=-1, keepdims=True)
    slopes = weights * (given @ np.repeat(v, shared, axis=1).swapaxes(-1, -2) - rows) * scale

    def of_groups(each: np.ndarray) -> np.ndarray:
        batch, _, *rest = each.shape
        return each.reshape(batch, groups, shared, *rest).sum(axis=2)

    found = [
        slopes @ np.repeat(k, shared, axis=1),
        of_groups(slopes.swapaxes(-1, -2) @ q),
        of_groups(weights.swapaxes(-1, -2) @ given),
    ]
    if sinks is not None:
        found.append(((weights.sum(axis=-1, keepdims=True) - 1) * rows).sum(axis=(0, 2, 3)))
    return found


def arguments(
    sizes: Sizes, dtype: mx.Dtype = mx.float32, key: mx.array | None = None
) -> list[mx.array]:
    """Queries, keys, values and the gradient of the result."""
    shapes = (
        (sizes.batch, sizes.heads, sizes.length, sizes.dims),
        (sizes.batch, sizes.groups, sizes.count, sizes.dims),
        (sizes.batch, sizes.groups, sizes.count, sizes.value_dims),
        (sizes.batch, sizes.heads, sizes.length, sizes.value_dims),
    )
    keys = mx.random.split(mx.random.key(sizes.length) if key is None else key, len(shapes))
    return [
        mx.random.normal(shape, key=key).astype(dtype)
        for shape, key in zip(shapes, keys, strict=True)
    ]


def mask_of(kind: str | None, sizes: Sizes) -> Mask:
    """`rows` is a mask for each token, `keys` one for all queries; both show two keys at least.

    With one alone, the gradients of queries and keys are zero, and their errors relative to nothing.
    """
    if kind not in ("rows", "keys"):
        return "causal" if kind == "causal" else None
    shape = sizes.scores if kind == "rows" else (sizes.count,)
    mask = mx.random.uniform(shape=shape, key=mx.random.key(7)) < 0.6
    mask[..., :2] = True
    return mask


def seen_by(mask: Mask, sizes: Sizes) -> np.ndarray:
    if isinstance(mask, mx.array):
        return np.broadcast_to(np.array(mask), sizes.scores)
    seen = np.ones(sizes.scores, bool)
    return seen if mask is None else np.tril(seen, sizes.count - sizes.length)


def in_float64(arrays: list[Any]) -> list[Any]:
    return [x if x is None else np.array(x.astype(mx.float32), np.float64) for x in arrays]


def computed(
    arrays: list[mx.array], mask: Mask, sinks: mx.array | None, backend: str = "metal"
) -> tuple[mx.array, list[mx.array]]:
    *inputs, given = arrays
    inputs += [] if sinks is None else [sinks]

    def run(q: mx.array, k: mx.array, v: mx.array, *sinks: mx.array) -> mx.array:
        return attention(q, k, v, mask, sinks=sinks[0] if sinks else None)

    with use_backend(backend):
        (y,), gradients = mx.vjp(run, inputs, [given])
    return y, gradients


def check(
    arrays: list[mx.array],
    mask: Mask,
    sizes: Sizes,
    sinks: mx.array | None = None,
    backend: str = "metal",
) -> None:
    dtype, seen = arrays[0].dtype, seen_by(mask, sizes)
    *exact, given = in_float64(arrays)
    [exact_sinks] = in_float64([sinks])
    y, gradients = computed(arrays, mask, sinks, backend)
    want = attended(*exact, seen, exact_sinks)[0]
    assert (y.dtype, y.shape) == (dtype, want.shape)
    assert relative_error(y, mx.array(want.astype(np.float32))) <= TOLERANCE[dtype]
    wanted = gradients_by_formula(*exact, seen, exact_sinks, given)
    for x, got, exact_gradient in zip([*arrays[:3], sinks], gradients, wanted, strict=False):
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        error = relative_error(got, mx.array(exact_gradient.astype(np.float32)))
        assert error <= max(GRADIENT_TOLERANCE, TOLERANCE[dtype])
