"""`bit_linear` on Metal: in one launch for some tens of rows, in two for more, or in plain operations.

See `ternary_matmul.metal` for which of these it is. Plain operations also compute what our kernels do
not take: many rows that are not quantised, gates with the exact GELU, matrices of fewer than 8 words or
of 2^31 and more.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..backend import launch, self_check
from ..backend.choice import use
from ..backend.dispatch import not_floats
from ..backend.self_check import packed_pattern
from ..ternary import packed_width
from ..ternary_matmul.definition import is_exact
from ..ternary_matmul.metal import GROUPS, MOST_TIMED_ROWS, SPLIT, TILES, way_of_product
from .definition import Options, Projection, Variant, defined, with_dense_gradient
from .metal_groups import GATES, MAX_MATRICES, in_groups
from .metal_tiles import in_split_tiles, in_tiles
from .metal_tuning import Tuning, slab_words

# smaller arrays lie in another address space than the others
MIN_WORDS = 8
# indices in larger ones are no numbers of 32 bits
MAX_WORDS = 2**31

_Product = Callable[..., mx.array]

_KERNELS = {
    in_groups: "bit_linear",
    in_tiles: "bit_linear_tiles",
    in_split_tiles: "bit_linear_split",
}
_OF_CODES: dict[str | None, _Product] = {TILES: in_tiles, SPLIT: in_split_tiles}


def unsupported(x: mx.array, projections: tuple[Projection, ...], options: Options) -> str | None:
    own_norms = [projection.norm for projection in projections]
    if reason := not_floats(x, options.norm, options.residual, *own_norms):
        return reason
    if len({norm.dtype for norm in own_norms if norm is not None}) > 1:
        return "norms of projections have several dtypes"
    return _fault(_way(x, projections, options), x, projections, options)


def metal(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    return _results(_way(x, projections, options), x, projections, options)


def _way(x: mx.array, projections: tuple[Projection, ...], options: Options) -> str | None:
    """The name of what computes the products, or `None` where `ternary_matmul` may choose."""
    sizes = [weight.size for weight, *_ in projections]
    fits = options.gate in GATES and min(sizes) >= MIN_WORDS and max(sizes) < MAX_WORDS
    width = x.shape[-1]
    rows = x.size // width
    if not fits or rows == 0:
        return None
    dims = width if options.gate is None else width // 2
    outputs = sum(weight.shape[0] for weight, *_ in projections)

    def results(way: str) -> mx.array:
        few = x.reshape(rows, width)[:MOST_TIMED_ROWS]
        residual = options.residual
        if residual is not None:
            residual = residual.reshape(rows, outputs)[:MOST_TIMED_ROWS]
        return _results(way, few, projections, options._replace(residual=residual))

    return way_of_product(
        "bit_linear",
        results,
        partial(_fault, x=x, projections=projections, options=options),
        x,
        (rows, dims, outputs),
        {"x": x.dtype, "quantize": options.quantize},
        mlx_is_exact=is_exact(mx.float32, dims, options.quantize),
        # codes may differ where a value lies between two
        must_agree=False,
    )


def _results(
    way: str | None, x: mx.array, projections: tuple[Projection, ...], options: Options
) -> mx.array:
    residual = options.residual
    variant = Variant.of(options)
    function = _differentiable(way, variant)
    results, start = [], 0
    for part in _parts(projections):
        stop = start + sum(weight.shape[0] for weight, *_ in part)
        added = residual if residual is None else residual[..., start:stop]
        results.append(function(*variant.flat(x, part, options.norm, added)))
        start = stop
    return results[0] if len(results) == 1 else mx.concatenate(results, axis=-1)


def _product(way: str | None, quantize: bool) -> _Product | None:
    """The kernel for the results of up to four matrices, or `None` for plain operations."""
    if way == GROUPS:
        return in_groups
    return _OF_CODES.get(way) if quantize else None


def _parts(projections: Sequence[Projection]) -> list[Sequence[Projection]]:
    return [projections[n : n + MAX_MATRICES] for n in range(0, len(projections), MAX_MATRICES)]


def _fault(
    way: str | None, x: mx.array, projections: tuple[Projection, ...], options: Options
) -> str | None:
    """Why kernels must not be used."""
    product = _product(way, options.quantize)
    if product is None:
        return None
    own_norm = projections[0].norm
    variant, width = Variant.of(options), x.shape[-1]
    dims = width if variant.gate is None else width // 2
    outputs = [[weight.shape[0] for weight, *_ in part] for part in _parts(projections)]
    kernels = {
        (
            len(part),
            Tuning.of(variant, x.size // width, dims, part) if product is in_groups else None,
        )
        for part in outputs
    }
    for matrices, tuning in kernels:
        if fault := _fault_of_kernel(product, x, matrices, tuning, own_norm, options):
            return fault
    return None


def _fault_of_kernel(
    product: _Product,
    x: mx.array,
    matrices: int,
    tuning: Tuning | None,
    own_norm: mx.array | None,
    options: Options,
) -> str | None:
    variant = Variant.of(options)
    dtypes: dict[str, Any] = {"x": x.dtype}
    for name, array in (
        ("norm", options.norm),
        ("residual", options.residual),
        ("own_norm", own_norm),
    ):
        dtypes[name] = None if array is None else array.dtype
    run = partial(product, variant)
    if tuning is None:
        # a second tile in each direction, and more than one step of each part
        rows, dims, outputs = 65, 9 * launch.SIMD_GROUP - 3, (65, *range(5, 4 + matrices))
        selected: dict[str, Any] = {"rows": rows}
    else:
        run = partial(run, tuning=tuning)
        # a second slab, and a second threadgroup of the first matrix
        rows, dims = (
            tuning.rows,
            16 * slab_words(variant, tuning.rows) + 48 - 7 * (not tuning.is_whole),
        )
        own = tuning.outputs
        # no array of fewer than 8 numbers, which would have another text
        first = max(tuning.simd_groups * own, 7) + 1
        outputs = (first, *range(own, own + matrices - 1))
        selected = tuning._asdict()
    return self_check.kernel_fault(
        _KERNELS[product],
        run,
        partial(defined, variant),
        partial(_check_inputs, variant, rows, dims, outputs, **dtypes),
        matrices=matrices,
        **selected,
        gate=variant.gate,
        quantize=variant.quantize,
        rounding=variant.rounding,
        **dtypes,
    )


@cache
def _differentiable(way: str | None, variant: Variant) -> Callable[..., Any]:
    product = _product(way, variant.quantize) or partial(_plain, way)
    return with_dense_gradient(partial(product, variant), variant)


def _plain(way: str | None, variant: Variant, *arrays: mx.array) -> mx.array:
    """The result in plain operations, of which products may choose how they are computed."""
    with nullcontext() if way is None else use(way):
        return defined(variant, *arrays)


def _check_inputs(
    variant: Variant,
    rows: int,
    dims: int,
    outputs: Sequence[int],
    *,
    x: mx.Dtype,
    norm: mx.Dtype | None,
    residual: mx.Dtype | None,
    own_norm: mx.Dtype | None,
) -> list[mx.array]:
    """The arrays of a call with some outputs of each matrix; `dims` must be 255 at least."""
    # normed and scaled, these are whole numbers but for rounding errors, and none is near a tie
    values = ((mx.arange(rows * dims) * 37 % 255) - 127).astype(mx.float32).reshape(rows, dims)
    norms = [mx.arange(dims) % 2 + 1, mx.arange(dims) // 2 % 2 + 1]
    for dtype, weight in zip((norm, own_norm), norms, strict=True):
        values = values if dtype is None else values / weight
    if variant.gate is not None:
        values = mx.concatenate([mx.full(values.shape, 2.0), values], axis=-1)
    added = (mx.arange(rows * sum(outputs)) % 7).reshape(rows, -1)
    projections = [
        Projection(
            packed_pattern(count, packed_width(dims)),
            mx.array([(1 + count) / 2048]),
            None if own_norm is None else norms[1].astype(own_norm),
        )
        for count in outputs
    ]
    return variant.flat(
        values.astype(x),
        projections,
        None if norm is None else norms[0].astype(norm),
        None if residual is None else added.astype(residual),
    )
