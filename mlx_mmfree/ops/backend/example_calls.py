"""Small arguments for the backends of each operation, which select every kernel."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from ..activations import ACTIVATIONS
from ..attention_step import Options as AttentionOptions
from ..bit_linear import Options as ProjectionOptions
from ..bit_linear import Projection
from ..bit_linear.metal_texts import MAX_MATRICES
from ..dense_matmul import BITS, AffineForm
from ..float_dtypes import FLOATS
from ..mlgru_step import Options as GateOptions
from ..rotated_heads import Rotation
from ..ternary import packed_width
from ..ternary_linear import Quantization
from . import choice, launch

ROWS = (*range(1, launch.MAX_GROUP_ROWS + 1), launch.FEW_ROWS + 16)
"""Numbers of rows that select every variant of a product: a group of each size, and tiles."""

# arrays of fewer than 8 numbers lie in another address space of Metal
_DIMS = (32, 4)


class Call(NamedTuple):
    """The arguments that an operation hands to its backends.

    Attributes:
        product: What computes a ternary product, as in `choice.NAMES`.
        is_trained: Whether gradients are traced.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    product: str = choice.DEFAULT
    is_trained: bool = False


def example_calls(rows: Sequence[int]) -> dict[str, Iterator[Call]]:
    """Small arguments of each kind that the layers use, by the names of the operations.

    Args:
        rows: The numbers of rows of products.
    """
    return {
        "activate": _activate_calls(),
        "adamw": _adamw_calls(),
        "attention": _attention_calls(),
        "attention_step": _attention_step_calls(),
        "bit_linear": _products(_bit_linear_calls, rows),
        "cross_entropy": _cross_entropy_calls(),
        "dense_matmul": _dense_matmul_calls(),
        "depthwise_convolution": _depthwise_convolution_calls(),
        "gated_activation": _gated_activation_calls(),
        "gated_delta_rule": _gated_delta_rule_calls(),
        "gated_linear_attention": _gated_linear_attention_calls(),
        "gated_rms_norm": _gated_rms_norm_calls(),
        "layer_norm": _layer_norm_calls(),
        "linear_scan": _linear_scan_calls(),
        "mlgru_step": _mlgru_step_calls(),
        "rms_norm": _rms_norm_calls(),
        "rms_norm_quantize": _rms_norm_quantize_calls(),
        "rotated_heads": _rotated_heads_calls(),
        "ternary_linear": _ternary_linear_calls(),
        "ternary_matmul": _products(_ternary_matmul_calls, rows),
    }


def _products(
    calls: Callable[[Sequence[int]], Iterator[Call]], rows: Sequence[int]
) -> Iterator[Call]:
    """The calls for numbers of rows, those for many rows also with split inputs."""
    yield from calls(rows)
    for call in calls([number for number in rows if number > launch.FEW_ROWS]):
        yield call._replace(product="split")


def _activate_calls() -> Iterator[Call]:
    for activation, dtype in product(ACTIVATIONS, FLOATS):
        yield Call((mx.zeros((1, 32), dtype), activation), {})


def _adamw_calls() -> Iterator[Call]:
    x = mx.zeros((32,))
    yield Call((x, x, x, x, mx.ones((3,)), (0.9, 0.95), 1e-8), {})


def _rotated_heads_calls() -> Iterator[Call]:
    rotation = Rotation.of(0, 2, mx.ones((4,)))
    for dtype, is_interleaved in product(FLOATS, (False, True)):
        yield Call((mx.zeros((1, 2, 32), dtype), rotation, 2, 1, is_interleaved), {})


def _attention_calls() -> Iterator[Call]:
    for dtype in FLOATS:
        x = mx.zeros((1, 1, 16, 64), dtype)
        yield Call((x, x, x, "causal"), {})
        yield Call((x, x, x, "causal"), {}, is_trained=True)
    x, seen = mx.zeros((1, 1, 16, 64)), mx.ones((16, 16), mx.bool_)
    for mask, sinks in (
        (None, None),
        (seen, None),
        ("causal", mx.zeros((1,))),
        (seen, mx.zeros((1,))),
    ):
        yield Call((x, x, x, mask), {"sinks": sinks}, is_trained=True)


def _attention_step_calls() -> Iterator[Call]:
    options = AttentionOptions(num_heads=2, wavelengths=mx.ones((32,)))
    for dtype in FLOATS:
        buffer = mx.zeros((1, 1, 2, 64), dtype)
        projected, positions = mx.zeros((1, 1, 4 * 64), dtype), mx.zeros((1, 1), mx.int32)
        yield Call((projected, buffer, buffer, positions, options), {})


def _cross_entropy_calls() -> Iterator[Call]:
    for dtype in FLOATS:
        yield Call((mx.zeros((1, 32), dtype), mx.zeros((1,), mx.int32)), {})


def _gated_activation_calls() -> Iterator[Call]:
    for activation, dtype in product(ACTIVATIONS, FLOATS):
        x = mx.zeros((1, 32), dtype)
        yield Call((x, x, activation), {})


def _dense_matmul_calls() -> Iterator[Call]:
    for dtype in FLOATS:
        x, weight = mx.zeros((1, 128), dtype), mx.zeros((4, 128), dtype)
        yield Call((x, weight, None), {})
        for bits in BITS:
            group = mx.zeros((4, 2), dtype)
            codes = mx.zeros((4, 4 * bits), mx.uint32)
            yield Call((x, codes, AffineForm(group, group, 64, bits)), {})


def _depthwise_convolution_calls() -> Iterator[Call]:
    for stride, dtype in product((1, 2), FLOATS):
        x, weight = mx.zeros((1, 2, 2, 32), dtype), mx.zeros((32, 3, 3, 1), dtype)
        for bias in (None, mx.zeros((32,), dtype)):
            yield Call((x, weight, bias, stride), {})


def _bit_linear_calls(numbers_of_rows: Sequence[int]) -> Iterator[Call]:
    for rows, dims, dtype in product(numbers_of_rows, _DIMS, FLOATS):
        x, norm = mx.zeros((rows, dims), dtype), mx.ones((dims,))
        weight, scale = mx.zeros((4, packed_width(dims)), mx.uint32), mx.ones((1,))
        plain = (Projection(weight, scale),)
        yield Call((x, plain, ProjectionOptions()), {})
        wide = Projection(mx.zeros((8, packed_width(dims)), mx.uint32), mx.ones((8,)))
        yield Call((x, (wide,) * 2, ProjectionOptions()), {})
        filling = Projection(mx.zeros((4096, packed_width(dims)), mx.uint32), scale)
        yield Call((x, (filling,), ProjectionOptions()), {})
        ragged = Projection(mx.zeros((4, packed_width(dims + 1)), mx.uint32), scale)
        yield Call((mx.zeros((rows, dims + 1), dtype), (ragged,), ProjectionOptions()), {})
        shared = ProjectionOptions(norm=norm, norm_eps=1e-6)
        for matrices in range(3, MAX_MATRICES + 1):
            yield Call((x, (wide,) * matrices, shared), {})
        yield Call((x, plain, ProjectionOptions(quantize=False)), {})
        normed = ProjectionOptions(eps=1e-6, rounding="half_away", norm=norm, norm_eps=1e-6)
        yield Call((x, (Projection(weight, scale, norm),) * 3, normed), {})
        down = (Projection(mx.zeros((4, packed_width(dims // 2)), mx.uint32), scale),)
        for gate in ACTIVATIONS:
            yield Call((x, down, ProjectionOptions(gate=gate, residual=x[:, :4])), {})


def _gated_delta_rule_calls() -> Iterator[Call]:
    # rows of a state in whole pieces or not, and columns four to a lane or one
    for length, keys, values in product((1, 65), (32, 20), (128, 32)):
        x, v = mx.zeros((1, 1, length, keys)), mx.zeros((1, 1, length, values))
        state = mx.zeros((1, 1, keys, values))
        for width, has_removal in product((1, keys), (False, True)):
            f = mx.ones((1, 1, length, width))
            yield Call((x, x, v, x, f, state, x if has_removal else None), {})


def _gated_linear_attention_calls() -> Iterator[Call]:
    for length, width, dtype in product((1, 65), (None, 1, 32), FLOATS):
        x = mx.zeros((1, 1, length, 32), dtype)
        f = None if width is None else mx.ones((1, 1, length, width), dtype)
        yield Call((x, x, x, f, mx.zeros((1, 1, 32, 32))), {})


def _gated_rms_norm_calls() -> Iterator[Call]:
    for dims, dtype in product(_DIMS, FLOATS):
        x = mx.zeros((1, dims), dtype)
        yield Call((x, x, mx.ones((dims,))), {"eps": 1e-6})


def _mlgru_step_calls() -> Iterator[Call]:
    for length, dims, dtype in product((1, 2), (*_DIMS, 33), FLOATS):
        options = GateOptions(eps=1e-6, lower_bound=mx.zeros((dims,), dtype))
        gates = mx.zeros((1, length, 3 * dims), dtype)
        yield Call((gates, mx.zeros((1, dims)), mx.ones((dims,)), options), {})
        places = mx.ones((1, length), mx.bool_)
        options = GateOptions(eps=1e-6, valid=places, starts=places)
        yield Call((gates, mx.zeros((1, dims)), mx.ones((dims,)), options), {})


def _linear_scan_calls() -> Iterator[Call]:
    for dims, dtype in product(_DIMS, FLOATS):
        x = mx.zeros((1, 2, dims), dtype)
        yield Call((x, x, mx.zeros((1, dims))), {})
    # with places of 64 bits
    x = mx.zeros((1, 2**16, 2**15))
    yield Call((x, x, mx.zeros((1, 2**15))), {})


def _layer_norm_calls() -> Iterator[Call]:
    for dims, dtype in product(_DIMS, FLOATS):
        weight = mx.ones((dims,), dtype)
        for given in ((None, None), (weight, weight)):
            yield Call((mx.zeros((1, dims), dtype), *given), {"eps": 1e-6})


def _rms_norm_calls() -> Iterator[Call]:
    for dims, dtype in product(_DIMS, FLOATS):
        x = mx.zeros((1, dims), dtype)
        for weight in (None, mx.ones((dims,), dtype)):
            yield Call((x, weight), {"eps": 1e-6})


def _rms_norm_quantize_calls() -> Iterator[Call]:
    for dims, dtype in product((*_DIMS, 33), FLOATS):
        x = mx.zeros((1, dims), dtype)
        for rounding in ("half_even", "half_away"):
            yield Call((x, None), {"eps": None, "rounding": rounding})
            yield Call((x, mx.ones((dims,), dtype)), {"eps": 1e-6, "rounding": rounding})


def _ternary_linear_calls() -> Iterator[Call]:
    for dims, dtype in product(_DIMS, FLOATS):
        x, weight = mx.zeros((1, dims), dtype), mx.zeros((3, dims), dtype)
        for quantization in (Quantization(), Quantization(activations=False)):
            yield Call((x, weight, None), {"eps": None, "quantization": quantization})
            norm = mx.ones((dims,), dtype)
            yield Call((x, weight, norm), {"eps": 1e-6, "quantization": quantization})


def _ternary_matmul_calls(numbers_of_rows: Sequence[int]) -> Iterator[Call]:
    # whole words and not
    for rows, dims in product(numbers_of_rows, (*_DIMS, 33)):
        weight = mx.zeros((3, packed_width(dims)), mx.uint32)
        for dtype in FLOATS:
            yield Call((mx.zeros((rows, dims), dtype), weight), {"codes": False})
        yield Call((mx.zeros((rows, dims)), weight), {"codes": True})
