"""`attention` on Metal with a fused gradient: no weights of keys are stored, and none lie in memory.

Forward is one launch. It also writes the log of the sum of `e^score` of each query, `(B, H, L)`, from
which the gradient makes the weights anew, tile by tile. The gradient is three launches: the sums of the
products of each result and its gradient, the gradients of keys and values by tiles of keys, and of
queries by tiles of queries. Nothing is added by several threads at once, so that the bits do not vary.
Sums and weights are float32, whatever the arguments are.

The format follows FlashAttention-2 (Dao, https://arxiv.org/abs/2307.08691).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..backend import launch, self_check
from ..backend.gradient import with_reference_gradient
from ..long_sums import long_sum
from . import metal_texts
from .definition import Mask, reference
from .metal_texts import ROWS

MAX_DIMS = 128
"""The most dims of a head: the rows and sums of a SIMD group are kept in registers."""

MIN_QUERIES = 16
"""The fewest queries: the weights of fewer are about as many numbers as the keys are."""

_TENSORS = ("queries", "keys", "values")
_BOTH = (False, True)


def _kernel(name: str, inputs: Sequence[str], outputs: Sequence[str], source: str) -> Any:
    return mx.fast.metal_kernel(
        name=f"attention_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
    )


def _inputs(has_mask: bool) -> list[str]:
    return [*_TENSORS, *(["mask"] if has_mask else [])]


_forward_kernels = {
    (has_mask, has_sinks): _kernel(
        f"forward{'_mask' if has_mask else ''}{'_sinks' if has_sinks else ''}",
        # (B, H, L, K), (B, G, N, K), (B, G, N, V), (1 or B, 1, 1 or L, 1 or N), (H,)
        [*_inputs(has_mask), *(["sinks"] if has_sinks else [])],
        ["result", "log_sums"],  # (B, L, H, V), (B, H, L)
        metal_texts.forward(has_mask, has_sinks),
    )
    for has_mask in _BOTH
    for has_sinks in _BOTH
}

_row_sums_kernel = _kernel(
    "row_sums",
    ["result", "cotangent", "log_sums"],  # (B, L, H, V), (B, L, H, V), (B, H, L)
    ["row_sums"],  # (B, H, L)
    metal_texts.ROW_SUMS,
)

_key_kernels, _query_kernels = (
    {
        has_mask: _kernel(
            f"{name}_gradient{'_mask' if has_mask else ''}",
            # and (B, L, H, V), (B, H, L), (B, H, L)
            [*_inputs(has_mask), "cotangent", "log_sums", "row_sums"],
            outputs,
            text(has_mask),
        )
        for has_mask in _BOTH
    }
    for name, outputs, text in (
        ("key", ["key_gradient", "value_gradient"], metal_texts.key_gradient),
        ("query", ["query_gradient"], metal_texts.query_gradient),
    )
)


class _Variant(NamedTuple):
    """The options that select the kernels, beside dtypes and sizes."""

    is_causal: bool
    has_mask: bool
    has_sinks: bool

    @classmethod
    def of(cls, mask: Mask, sinks: mx.array | None) -> "_Variant":
        return cls(isinstance(mask, str), isinstance(mask, mx.array), sinks is not None)

    def template(self, queries: mx.array, values: mx.array) -> list[tuple[str, Any]]:
        dims = _padded_dims(queries, values)
        return [("T", queries.dtype), ("D", dims), ("CAUSAL", self.is_causal)]


def takes(queries: mx.array, values: mx.array, mask: Mask, bias: mx.array | None) -> bool:
    """Returns whether there are kernels for arguments."""
    return (
        bias is None
        and queries.shape[2] >= MIN_QUERIES
        and _padded_dims(queries, values) <= MAX_DIMS
        and (not isinstance(mask, mx.array) or mask.dtype == mx.bool_)
    )


def fault(queries: mx.array, values: mx.array, mask: Mask, sinks: mx.array | None) -> str | None:
    """Why the kernels for arguments must not be used, or `None`."""
    variant, dims = _Variant.of(mask, sinks), _padded_dims(queries, values)
    gradient = partial(_with_gradient, variant)

    def gradients(function: Callable[..., Any], *arrays: mx.array) -> list[mx.array]:
        results, found = mx.vjp(function, [*arrays], _check_cotangents(arrays))
        return [results[0], *(g for g, x in zip(found, arrays, strict=True) if x.dtype != mx.bool_)]

    return self_check.kernel_fault(
        "attention_gradient",
        partial(gradients, gradient),
        partial(gradients, partial(_definition, variant)),
        lambda: _check_inputs(variant, dims, queries.dtype),
        queries=queries.dtype,
        dims=dims,
        **variant._asdict(),
    )


def run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    dtype = queries.dtype
    # what is kept for the gradient is what the kernels read
    arrays = [mx.contiguous(x.astype(dtype)) for x in (queries, keys, values)]
    if isinstance(mask, mx.array):
        arrays.append(mx.contiguous(mask.reshape((1,) * (4 - mask.ndim) + mask.shape)))
    if sinks is not None:
        arrays.append(sinks.astype(mx.float32))
    y, _ = _with_gradient(_Variant.of(mask, sinks), *arrays)
    return y


def _padded_dims(queries: mx.array, values: mx.array) -> int:
    """The dims of both in whole pairs of matrices of 8 rows and 8 columns."""
    return -(-max(queries.shape[3], values.shape[3]) // 16) * 16


def _with_gradient(variant: _Variant, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    y, log_sums = _function(variant)(*arrays)
    return y, log_sums


@cache
def _function(variant: _Variant) -> Callable[..., Any]:
    return with_reference_gradient(
        partial(_forward, variant), partial(_definition, variant), partial(_gradients, variant)
    )


def _forward(variant: _Variant, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    queries, _, values = arrays[:3]
    batch, heads, length, _ = queries.shape
    result, log_sums = launch.launch(
        _forward_kernels[variant.has_mask, variant.has_sinks],
        inputs=arrays,
        template=variant.template(queries, values),
        output_shapes=[(batch, length, heads, values.shape[3]), (batch, heads, length)],
        output_dtypes=[queries.dtype, mx.float32],
        **_grid(length, batch * heads, metal_texts.FORWARD_GROUPS),
    )
    return result.swapaxes(1, 2), log_sums


def _gradients(
    variant: _Variant,
    arrays: Sequence[mx.array],
    cotangents: Sequence[mx.array],
    outputs: Sequence[mx.array],
) -> tuple[mx.array, ...]:
    queries, keys, values = arrays[:3]
    batch, heads, length, _ = queries.shape
    y, log_sums = outputs
    result, cotangent = y.swapaxes(1, 2), mx.contiguous(cotangents[0].swapaxes(1, 2))
    (row_sums,) = launch.launch(
        _row_sums_kernel,
        inputs=[result, cotangent, log_sums],
        output_shapes=[log_sums.shape],
        output_dtypes=[mx.float32],
        **_grid(length, batch * heads, metal_texts.SUM_ROWS, metal_texts.SUM_ROWS),
    )
    given: dict[str, Any] = {
        "inputs": [*arrays[: 3 + variant.has_mask], cotangent, log_sums, row_sums],
        "template": variant.template(queries, values),
    }
    groups, count = keys.shape[1:3]
    of_keys, of_values = launch.launch(
        _key_kernels[variant.has_mask],
        output_shapes=[keys.shape, values.shape],
        output_dtypes=[queries.dtype] * 2,
        **_grid(count, batch * groups, metal_texts.BACKWARD_GROUPS),
        **given,
    )
    (of_queries,) = launch.launch(
        _query_kernels[variant.has_mask],
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
        **_grid(length, batch * heads, metal_texts.BACKWARD_GROUPS),
        **given,
    )
    found = [of_queries, of_keys, of_values]
    if variant.has_mask:
        found.append(mx.zeros_like(arrays[3]))
    if variant.has_sinks:
        # a sink takes weight from all values, and has none itself
        weights = mx.exp(arrays[-1][:, None] - log_sums)
        found.append(-long_sum((weights * row_sums).swapaxes(0, 1).reshape(heads, -1), axis=-1))
    return tuple(found)


def _grid(rows: int, heads: int, groups: int, each: int = ROWS) -> dict[str, Any]:
    threads = launch.SIMD_GROUP * groups
    return {"grid": (-(-rows // each) * threads, heads, 1), "threadgroup": (threads, 1, 1)}


def _definition(variant: _Variant, *arrays: mx.array) -> tuple[mx.array, mx.array]:
    """The result by plain operations, and what stands for the logs, which nothing depends on."""
    mask: Mask = "causal" if variant.is_causal else arrays[3] if variant.has_mask else None
    sinks = arrays[-1] if variant.has_sinks else None
    y = reference(arrays[0], arrays[1], arrays[2], mask, None, sinks)
    return y, mx.zeros(y.shape[:3])


def _check_inputs(variant: _Variant, dims: int, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    # two threadgroups, and two tiles of the largest size, none of them full
    length, count = ROWS + 3, ROWS + 5
    shapes = ((1, 2, length, dims), (1, 1, count, dims), (1, 1, count, dims))
    arrays = [_pattern(n, shape).astype(dtype) for n, shape in enumerate(shapes)]
    if variant.has_mask:
        arrays.append(_pattern(3, (1, 1, length, count)) < 0.3)
    if variant.has_sinks:
        arrays.append(_pattern(4, (2,)))
    return tuple(arrays)


def _check_cotangents(arrays: Sequence[mx.array]) -> list[mx.array]:
    batch, heads, length, _ = arrays[0].shape
    of_y = _pattern(5, (batch, heads, length, arrays[2].shape[3])).astype(arrays[0].dtype)
    return [of_y, mx.zeros((batch, heads, length))]


def _pattern(which: int, shape: tuple[int, ...]) -> mx.array:
    """Numbers between -1 and 1, the same in every process."""
    return ((mx.arange(math.prod(shape)) * (37 + 16 * which) % 101) / 50.0 - 1.0).reshape(shape)
