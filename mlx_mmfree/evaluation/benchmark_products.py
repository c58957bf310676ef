"""Products of ternary layers and heads with weights in cold memory, beside plain reads of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..layers import PackedBitLinear, apply_head
from ..ops.backend.choice import kept_choices
from ..ops.backend.dispatch import on_cpu
from ..ops.backend.inspection import metal_kernels
from ..platform.allocator import keep_freed_memory
from ..platform.gpu_time import queued_seconds
from .benchmark_limits import Limits, held_arrays, limits
from .benchmark_peers import mlx_lm_missing, peers
from .benchmark_record import READ, TERNARY, Record
from .benchmark_rounds import elapsed, in_turn
from .benchmark_weights import random_head, random_packed

# as in a model, a few products are queued together and share the overhead of an evaluation
_GROUP = 8
_WORDS_OF_A_ROW = 640


def run(
    shapes: Sequence[Sequence[int]],
    rows: Sequence[int],
    heads: Sequence[Sequence[int]],
    head_bits: Sequence[int],
    walk_bytes: int,
    rounds: int,
) -> tuple[list[Record], dict]:
    """Measures products, including the quantisation of their input and the start of the threads.

    On a GPU, products of other libraries with the same shapes come beside the ternary ones, activations
    are bfloat16, and a measurement queues many products.

    Args:
        shapes: Output and input dims of ternary matrices.
        rows: Numbers of tokens multiplied at a time. The limit of one token is a plain read, that of
            several is arithmetic.
        heads: Output and input dims of heads.
        head_bits: Bits of the heads' weights; 16 means bfloat16.
        walk_bytes: Smallest number of bytes of all copies of a matrix, so that each copy has left the
            caches when its turn comes.
        rounds: Number of measurements, after one that does not count.
    """
    keep_freed_memory()
    records = []
    with limits() as found:
        notes = _limit_notes(found, walk_bytes, rounds)
        for product in _products(shapes, rows, heads, head_bits):
            first = product.make()
            copies = max(2, math.ceil(walk_bytes / first.weight.nbytes))
            layers = [first, *(product.make() for _ in range(copies - 1))]
            for count in product.rows:
                records.append(_measure(found, product, layers, count, rounds))
            del first, layers
    notes["chosen"] = {name: facts["chosen"] for name, facts in kept_choices().items()}
    # what a kernel's fault has slowed down is no measure of it
    notes["switched_off"] = {name: fault for name, fault in metal_kernels().items() if fault}
    return records, notes


class _Product(NamedTuple):
    """What is measured.

    Attributes:
        name: What the names of its records begin with.
        weights: The number of weights of a matrix.
        input_dims: The number of inputs.
        rows: Numbers of tokens multiplied at a time.
        make: Makes a layer.
        apply: Applies a layer to rows of inputs.
    """

    name: str
    weights: int
    input_dims: int
    rows: Sequence[int]
    make: Callable[[], nn.Module]
    apply: Callable[[nn.Module, mx.array], mx.array]


def _products(
    shapes: Sequence[Sequence[int]],
    rows: Sequence[int],
    heads: Sequence[Sequence[int]],
    head_bits: Sequence[int],
) -> Iterator[_Product]:
    make: Callable[[], nn.Module]
    others = [] if on_cpu() else peers()
    for outputs, inputs in shapes:
        title, weights = f"{outputs} x {inputs}", outputs * inputs
        make = partial(_ternary, outputs, inputs, random_packed(outputs, inputs))
        yield _Product(f"{TERNARY} {title}", weights, inputs, rows, make, _call)
        for peer in others:
            make = partial(peer.make, outputs, inputs, _dtype())
            yield _Product(f"{peer.name} {title}", weights, inputs, rows, make, _call)
    for outputs, inputs in heads:
        for bits in head_bits:
            title = f"head {outputs} x {inputs}, {bits} bits"
            make = partial(random_head, outputs, inputs, bits, _dtype())
            yield _Product(title, outputs * inputs, inputs, (1,), make, apply_head)


def _limit_notes(found: Limits, walk_bytes: int, rounds: int) -> dict:
    rows = max(walk_bytes // 4 // _WORDS_OF_A_ROW, 1)
    buffer = mx.full((rows, _WORDS_OF_A_ROW), 1, mx.uint32)
    plain = [found.read_seconds([buffer]) for _ in range(rounds + 1)][1:]
    notes = {
        "bytes_per_second": buffer.nbytes / min(plain),
        "macs_per_second": found.multiply_rate(),
        "read_method": found.read_method(),
        "arithmetic": found.arithmetic,
    }
    missing = None if on_cpu() else mlx_lm_missing()
    return notes if missing is None else notes | {"left_out": {"MLX LM": missing}}


def _measure(
    found: Limits, product: _Product, layers: Sequence[nn.Module], rows: int, rounds: int
) -> Record:
    x = mx.random.normal((rows, product.input_dims)).astype(_dtype())
    mx.eval(x)
    rate = found.multiply_rate() if rows > 1 else None

    def limit_seconds() -> float:
        if rate is not None:
            return product.weights * rows / (found.multiply_rate() or rate)
        arrays = [array for layer in layers for array in held_arrays(layer)]
        return found.read_seconds(arrays) / len(layers)

    own, limit = in_turn(
        rounds, limit_seconds, lambda: _seconds(product.apply, layers, x) / len(layers)
    )
    return Record(
        f"{product.name}, {_rows(rows)}",
        threads=found.threads,
        limit=READ if rate is None else found.arithmetic,
        bytes=sum(array.nbytes for array in held_arrays(layers[0])),
        macs=product.weights * rows,
        seconds=own,
        limit_seconds=limit,
        unit="rows",
        count=rows,
    )


def _seconds(
    apply: Callable[[nn.Module, mx.array], mx.array], layers: Sequence[nn.Module], x: mx.array
) -> float:
    """The seconds that all layers take together."""
    if not on_cpu():
        return queued_seconds(lambda: [apply(layer, x) for layer in layers])

    def apply_all() -> None:
        for first in range(0, len(layers), _GROUP):
            mx.eval([apply(layer, x) for layer in layers[first : first + _GROUP]])

    return elapsed(apply_all)


def _dtype() -> mx.Dtype:
    """The dtype of activations: on a GPU that of published checkpoints."""
    return mx.float32 if on_cpu() else mx.bfloat16


def _call(layer: nn.Module, x: mx.array) -> mx.array:
    y: mx.array = layer(x)
    return y


def _ternary(outputs: int, inputs: int, weight: mx.array) -> PackedBitLinear:
    layer = PackedBitLinear(inputs, outputs)
    layer.weight = mx.bitwise_or(weight, mx.array(0, weight.dtype))
    mx.eval(layer.parameters())
    return layer


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"
