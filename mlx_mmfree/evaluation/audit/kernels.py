"""What the compiled kernels of this library take, each by the shapes that its call declares.

This is the one place that says so. A kernel that is not here is unknown. The counts are those of the
formulas in `ops/<op>/__init__.py`. A ternary product of `K` inputs and `N` outputs counts as `K N`
additions, of integers where the activations are codes of 8 bits.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .primitives import affine_work, product_work
from .work import Call, Cost, Product, Work, work

_NUMBERS = 32
"""Kernels compute in float32, and add up codes in 32 bits."""


def cost_of_kernel(call: Call) -> Cost | None:
    """What a compiled kernel takes; `None` if that is not declared."""
    found = KERNELS.get(call.name)
    return None if found is None else found(call)


def _activation(name: str, count: int) -> Work:
    each: dict[str, dict[str, int]] = {
        "silu": {"multiply": 1, "other": 1},
        "relu2": {"multiply": 1, "other": 1},
        "gelu": {"multiply": 1, "add": 1, "other": 3},
        "relu": {"other": 1},
    }
    return work(**{kind: number * count for kind, number in each[name].items()})


def _norm(rows: int, dims: int, has_weight: bool) -> Work:
    """Squares, their mean with epsilon, its root, and what it is multiplied into."""
    multiply = (3 if has_weight else 2) * dims
    return work(multiply=rows * multiply, add=rows * dims, other=2 * rows)


def _codes(rows: int, dims: int) -> Work:
    """Magnitudes, the largest, the scale, and codes that are rounded and kept in bounds."""
    return work(multiply=rows * dims, other=rows * (4 * dims + 1))


def _ternary(
    rows: int, inputs: int, weight: mx.array, operands: tuple[int, ...], *, has_codes: bool
) -> Product:
    outputs = weight.shape[0]
    count = rows * inputs * outputs
    own = work(integer=count) if has_codes else work(add=count)
    return Product(inputs, outputs, rows, 1, operands, True, own)


def _bit_linear(call: Call) -> Cost:
    x, norm, residual, *rest = call.arguments
    eps, _, has_codes, gate, norm_eps = call.options
    rows, dims = x.size // x.shape[-1], x.shape[-1] // (2 if gate else 1)
    total = work()
    if gate:
        total += _activation(gate, rows * dims) + work(multiply=rows * dims)
    if norm_eps is not None:
        total += _norm(rows, dims, norm is not None)
    if has_codes and eps is None:
        total += _codes(rows, dims)
    products = []
    for n in range(0, len(rest), 3):
        weight, scale, _ = rest[n : n + 3]
        if eps is not None:
            total += _norm(rows, dims, True)
            total += _codes(rows, dims) if has_codes else work()
        place: Any = call.places[3 + n]
        product = _ternary(rows, dims, weight, (place,), has_codes=has_codes)
        products.append(product)
        # the scale of the matrix over that of the codes, then times the sums
        total += product.work + work(multiply=rows * weight.shape[0])
        total += work(other=rows * scale.size) if has_codes else work()
    if residual is not None:
        total += work(add=residual.size)
    return Cost(total, tuple(products))


def _ternary_matmul(call: Call) -> Cost:
    x, weight = call.inputs
    product = _ternary(x.size // x.shape[-1], x.shape[-1], weight, (1,), has_codes=call.options[0])
    return Cost(product.work, (product,))


def _dense_matmul(call: Call) -> Cost:
    x, weight, scales, _ = call.arguments
    inputs, outputs = x.shape[-1], weight.shape[0]
    rows = x.size // inputs
    own = product_work(rows * inputs * outputs, _NUMBERS)
    if scales is not None:
        own = affine_work(rows, inputs, outputs, scales.shape[1], _NUMBERS)
    return Cost(own, (Product(inputs, outputs, rows, 1, (0, 1), False, own),))


def _mlgru_step(call: Call) -> Cost:
    gates, _, _, bound, valid = call.arguments
    dims = gates.shape[-1] // 3
    rows = gates.size // gates.shape[-1]
    count = rows * dims
    # two SiLUs, the gated input, the recurrence, and the normed gate times the output
    total = work(multiply=5 * count, add=2 * count, other=3 * count) + _norm(rows, dims, True)
    if bound is not None:
        total += work(multiply=count, add=2 * count)
    if valid is not None:
        total += work(other=2 * count)
    return Cost(total)


def _softmax(count: int) -> Work:
    return work(add=2 * count, other=3 * count)


def _meeting(
    rows: int, inputs: int, outputs: int, count: int, operands: tuple[int, ...]
) -> Product:
    """A product of activations with activations."""
    own = product_work(rows * inputs * outputs * count, _NUMBERS)
    return Product(inputs, outputs, rows, count, operands, False, own)


def _attention_step(call: Call) -> Cost:
    _, keys, values, _, wavelengths, query_norm, _ = call.arguments
    num_heads = call.options[0]
    batch, groups, _, dims = keys.shape
    used = call.outputs[3].shape[1]
    turned = batch * (num_heads + groups)
    scores = _meeting(1, dims, used, batch * num_heads, (0, 1))
    mixed = _meeting(1, used, dims, batch * num_heads, (0, 2))
    total = scores.work + mixed.work + _softmax(batch * num_heads * used)
    # queries are scaled, and each slot's position is looked at
    total += work(multiply=batch * num_heads * dims, integer=batch * used)
    if query_norm is not None:
        total += _norm(turned, dims, True)
    if wavelengths is not None:
        angles = batch * dims // 2
        total += work(other=3 * angles, multiply=2 * turned * dims, add=turned * dims)
    slot = batch * groups * dims
    read = {1: used * slot * keys.itemsize, 2: used * slot * values.itemsize}
    return Cost(
        total,
        (scores, mixed),
        read,
        {1: slot * keys.itemsize, 2: slot * values.itemsize},
    )


def _attention(call: Call) -> Cost:
    q, k, v, *_ = call.inputs
    batch, heads, length, dims = q.shape
    known, value_dims = k.shape[2], v.shape[3]
    pairs = batch * heads * length
    scores = _meeting(length, dims, known, batch * heads, (0, 1))
    mixed = _meeting(length, known, value_dims, batch * heads, (0, 2))
    total = scores.work + mixed.work + _softmax(pairs * known) + work(multiply=q.size)
    return Cost(total, (scores, mixed))


def _gated_linear_attention(call: Call) -> Cost:
    q, _, v, _, gates = call.arguments
    batch, heads, length, dims = q.shape
    value_dims = v.shape[3]
    steps = batch * heads * length
    size = steps * dims * value_dims
    answered = _meeting(1, dims, value_dims, steps, (0, 3))
    total = answered.work + work(multiply=size if gates is None else 2 * size, add=size)
    return Cost(total, (answered,))


def _gated_activation(call: Call) -> Cost:
    count = call.outputs[0].size
    return Cost(_activation(call.options[0], count) + work(multiply=count))


def _activate(call: Call) -> Cost:
    return Cost(_activation(call.options[0], call.outputs[0].size))


def _rms_norm(call: Call) -> Cost:
    x, weight = call.arguments
    return Cost(_norm(x.size // x.shape[-1], x.shape[-1], weight is not None))


def _rms_norm_quantize(call: Call) -> Cost:
    x, weight = call.arguments
    rows, dims = x.size // x.shape[-1], x.shape[-1]
    norm = work() if call.options[0] is None else _norm(rows, dims, weight is not None)
    return Cost(norm + _codes(rows, dims))


def _layer_norm(call: Call) -> Cost:
    x, weight, bias = call.arguments
    rows, dims = x.size // x.shape[-1], x.shape[-1]
    centred = work(add=2 * x.size, other=rows)
    shifted = work() if bias is None else work(add=x.size)
    return Cost(centred + _norm(rows, dims, weight is not None) + shifted)


def _linear_scan(call: Call) -> Cost:
    count = call.inputs[0].size
    return Cost(work(multiply=count, add=count))


def _rotated_heads(call: Call) -> Cost:
    projected = call.inputs[0]
    queries, groups, _ = call.options
    turned = projected.size * (queries + groups) // (queries + 2 * groups)
    return Cost(work(multiply=2 * turned, add=turned))


def _depthwise_convolution(call: Call) -> Cost:
    _, weight, bias = call.arguments
    y = call.outputs[0]
    window = weight.size // weight.shape[0]
    shifted = work() if bias is None else work(add=y.size)
    return Cost(product_work(y.size * window, _NUMBERS) + shifted)


def _size_sums(call: Call) -> Cost:
    count = call.inputs[0].size
    return Cost(work(add=count, other=count))


def _pack_rounded(call: Call) -> Cost:
    """Weights over their scale, rounded and kept in bounds, are shifted into words."""
    count = call.inputs[0].size
    return Cost(work(other=3 * count, integer=2 * count))


KERNELS: dict[str, Callable[[Call], Cost]] = {
    "Activate": _activate,
    "Attention": _attention,
    "AttentionStep": _attention_step,
    "BitLinear": _bit_linear,
    "DenseMatmul": _dense_matmul,
    "DepthwiseConvolution": _depthwise_convolution,
    "GatedActivation": _gated_activation,
    "GatedLinearAttention": _gated_linear_attention,
    "LayerNorm": _layer_norm,
    "LinearScan": _linear_scan,
    "MlgruStep": _mlgru_step,
    "PackRounded": _pack_rounded,
    "RmsNorm": _rms_norm,
    "RmsNormQuantize": _rms_norm_quantize,
    "RotatedHeads": _rotated_heads,
    "SizeSumsOf": _size_sums,
    "TernaryMatmul": _ternary_matmul,
}
"""By the name of the primitive."""
