"""The costs of MLX's operations, by the shapes and dtypes of their arrays.

A product of `K` inputs and `N` outputs counts as `K N` multiplications and as many additions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from ...ops.backend.cost import Call, Cost, Product, Work, affine_work, product_work, work
from ...ops.backend.dispatch import operations

VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends"),
    *("ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "StopGradient"),
    *("Transpose", "Unflatten", "View"),
}
"""Another look at an array, which computes and moves nothing."""

_MOVES = {"AsType", "Concatenate", "Contiguous", "Full", "Pad"}
"""Read their inputs and write their outputs, without arithmetic."""

_OPERATIONS: dict[str, str] = {
    **dict.fromkeys(("Add", "Subtract"), "add"),
    **dict.fromkeys(("Multiply", "Square"), "multiply"),
    **dict.fromkeys(
        (
            *("Abs", "ArcCos", "ArcSin", "ArcTan", "ArcTan2", "Ceil", "Cos", "Cosh", "Divide"),
            *("Equal", "NaNEqual", "Erf", "ErfInv", "Exp", "Expm1", "Floor", "FloorDivide"),
            *("Greater", "GreaterEqual", "Less", "LessEqual", "Log", "Log10", "Log1p", "Log2"),
            *("LogAddExp", "Maximum", "Minimum", "Negative", "NotEqual", "Power", "Remainder"),
            *("Round", "Rsqrt", "Select", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh"),
        ),
        "other",
    ),
    **dict.fromkeys(
        (
            *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseInvert", "LeftShift", "RightShift"),
            *("LogicalAnd", "LogicalOr", "LogicalNot"),
        ),
        "integer",
    ),
}
"""Of each number of the result, one operation of this kind."""

ELEMENTWISE = {*_OPERATIONS, "AsType"}
"""Operations that MLX fuses where a step is compiled on a GPU."""

_SUMS = {"Sum": "add", "Prod": "multiply", "CumSum": "add", "CumProd": "multiply"} | dict.fromkeys(
    ("Max", "Min", "And", "Or", "ArgReduce", "ArgMax", "ArgMin", "CumMax", "CumMin"), "other"
)
"""One operation of this kind for each number that joins another."""


def cost_of_mlx(call: Call) -> Cost | None:
    """The cost of an operation of MLX; `None` if that is not known."""
    name = call.name
    if name in VIEWS:
        return Cost(written=dict.fromkeys(range(len(call.outputs)), 0))
    if name in _MOVES:
        return Cost()
    if name in _OPERATIONS:
        return Cost(_of_kind(call, _OPERATIONS[name], call.outputs[0].size))
    if name in _SUMS:
        return Cost(_of_kind(call, _SUMS[name], _additions(call)))
    found = _OTHERS.get(name)
    return None if found is None else found(call)


def cost_of_kernel(call: Call) -> Cost | None:
    """The cost of a compiled kernel, as its operation declares it; `None` if none does."""
    found = (operation.costs.get(call.name) for operation in operations().values())
    cost = next((each for each in found if each is not None), None)
    return None if cost is None else cost(call)


def _of_kind(call: Call, kind: str, count: int) -> Work:
    """Operations on floats where an input is one, else on integers."""
    floats = [x.dtype for x in call.inputs if mx.issubdtype(x.dtype, mx.floating)]
    dtypes = floats or [x.dtype for x in (*call.inputs, *call.outputs)]
    bits = 8 * max(dtype.size for dtype in dtypes)
    return work(**{kind if floats else "integer": count}, bits=bits)


def _additions(call: Call) -> int:
    size, result = call.inputs[0].size, call.outputs[0].size
    rows = size // max(call.inputs[0].shape[-1], 1)
    return size - (rows if size == result else result)


def _bits(*arrays: mx.array) -> int:
    return 8 * max(x.dtype.size for x in arrays)


def _matmul(call: Call) -> Cost:
    a, b, *_ = call.inputs
    y = call.outputs[0]
    rows, inputs, outputs = a.shape[-2], a.shape[-1], b.shape[-1]
    count = y.size // max(rows * outputs, 1)
    own = product_work(rows * inputs * outputs * count, _bits(a, b))
    product = Product(inputs, outputs, rows, count, (0, 1), False, own)
    added = work(add=y.size, bits=_bits(y)) if call.name == "AddMM" else work()
    return Cost(own + added, (product,))


def _quantized(call: Call) -> Cost:
    x, _, scales, *_ = call.inputs
    inputs, outputs = x.shape[-1], call.outputs[0].shape[-1]
    rows = call.outputs[0].size // max(outputs, 1)
    groups = scales.shape[-1] if scales.shape[-2] == outputs else scales.shape[-2]
    own = affine_work(rows, inputs, outputs, groups, _bits(x))
    return Cost(own, (Product(inputs, outputs, rows, 1, (0, 1), False, own),))


def _gathered(call: Call) -> Cost:
    """Of several matrices in codes, each row reads one."""
    indices, count = call.inputs[-1], call.inputs[1].shape[0]
    read = min(indices.size, count)
    parts = {n: call.inputs[n].nbytes // max(count, 1) * read for n in (1, 2, 3)}
    return replace(_quantized(call), read=parts)


def _convolution(call: Call) -> Cost:
    x, weight = call.inputs
    y = call.outputs[0]
    outputs = weight.shape[0]
    window = weight.size // max(outputs, 1)
    own = product_work(y.size * window, _bits(x, weight))
    # each channel with a window of its own mixes no channels
    is_depthwise = weight.shape[-1] == 1 and x.shape[-1] == outputs > 1
    rows = y.size // max(outputs, 1)
    product = Product(window, outputs, rows, 1, (0, 1), False, own)
    return Cost(own, () if is_depthwise else (product,))


def _softmax(call: Call) -> Cost:
    size = call.outputs[0].size
    rows = size // max(call.outputs[0].shape[-1], 1)
    counts = {"add": 2 * size - rows, "other": 3 * size - rows}
    return Cost(work(**counts, bits=_bits(call.inputs[0])))


def _sorted(call: Call) -> Cost:
    size = call.inputs[0].size
    depth = math.ceil(math.log2(max(call.inputs[0].shape[-1], 2)))
    return Cost(_of_kind(call, "other", size * depth))


def _taken(call: Call) -> Cost:
    """Some numbers of the first input, as many as the result has."""
    return Cost(read={0: call.outputs[0].nbytes})


def _replaced(update: int) -> Callable[[Call], Cost]:
    """Some numbers of the first input, which is written in place, as the decoding loop lets it be."""

    def cost(call: Call) -> Cost:
        size = call.inputs[update].nbytes
        return Cost(read={0: 0}, written={0: size})

    return cost


def _counted(call: Call) -> Cost:
    return Cost(_of_kind(call, "add", call.outputs[0].size))


_PRODUCTS: Sequence[str] = ("Matmul", "AddMM", "GatherMM", "BlockMaskedMM", "SegmentedMM")
_OTHERS: dict[str, Callable[[Call], Cost]] = {
    **dict.fromkeys(_PRODUCTS, _matmul),
    "QuantizedMatmul": _quantized,
    "GatherQMM": _gathered,
    **dict.fromkeys(("ArgSort", "Sort", "ArgPartition", "Partition"), _sorted),
    **dict.fromkeys(("DynamicSlice", "Gather", "GatherAxis"), _taken),
    **dict.fromkeys(("DynamicSliceUpdate", "SliceUpdate"), _replaced(1)),
    **dict.fromkeys(("Scatter", "ScatterAxis"), _replaced(-1)),
    "Arange": _counted,
    "Convolution": _convolution,
    "Softmax": _softmax,
}
