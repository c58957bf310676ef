"""Ternary products from cold memory against a plain read of the same memory."""

import math
import time
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from ..layers import PackedBitLinear
from ..ops import backend_report
from ..platform.memory_reader import MemoryReader
from .benchmark_bandwidth import median
from .benchmark_weights import random_packed

SHAPES = ((6912, 2560), (2560, 6912), (11264, 2048))
"""Outputs and inputs: up and down projection of BitNet-2B-4T, stacked gates of MMfreeLM-1.3B."""

READINGS = 3
"""Plain reads for each measured walk; the fastest counts."""

# Products queued at a time: as in a model, MLX's hand-over is shared by a few of them.
_GROUP = 8


@dataclass(frozen=True)
class ProductResult:
    """One ternary linear, quantisation of its input and scaling of its result included.

    Attributes:
        output_dims: Rows of the matrix.
        input_dims: Columns of the matrix.
        rows: Tokens multiplied at a time.
        copies: Copies of the matrix that are walked over.
        matrix_bytes: Size of one.
        seconds: Time of one product, a value for each round.
        read_seconds: Time of a plain read of one matrix in the same round.
    """

    output_dims: int
    input_dims: int
    rows: int
    copies: int
    matrix_bytes: int
    seconds: tuple[float, ...]
    read_seconds: tuple[float, ...]

    @cached_property
    def bytes_per_second(self) -> float:
        """Weights read, by the median round."""
        return self.matrix_bytes / median(self.seconds)

    @cached_property
    def macs_per_second(self) -> float:
        """Multiply-accumulates, by the median round."""
        return self.output_dims * self.input_dims * self.rows / median(self.seconds)

    @cached_property
    def bandwidth_share(self) -> float:
        """Median over the rounds of the time of the plain read over that of the product."""
        return median(
            [read / own for own, read in zip(self.seconds, self.read_seconds, strict=True)]
        )

    def to_json(self) -> dict:
        return {
            "output_dims": self.output_dims,
            "input_dims": self.input_dims,
            "rows": self.rows,
            "copies": self.copies,
            "walked_bytes": self.copies * self.matrix_bytes,
            "gb_per_second": self.bytes_per_second / 1e9,
            "gmac_per_second": self.macs_per_second / 1e9,
            "bandwidth_share": self.bandwidth_share,
            "seconds": list(self.seconds),
            "read_seconds": list(self.read_seconds),
        }


def measure_products(
    reader: MemoryReader,
    output_dims: int,
    input_dims: int,
    *,
    rows: tuple[int, ...],
    walk_bytes: int,
    rounds: int,
) -> list[ProductResult]:
    """Measures one shape with several numbers of rows, in turn with plain reads.

    Args:
        reader: Reads the copies of the matrix.
        output_dims: Rows of the matrix.
        input_dims: Columns of the matrix.
        rows: Tokens multiplied at a time, one result for each.
        walk_bytes: The copies take at least this much, so that each is cold when its turn comes.
        rounds: How often everything is measured.
    """
    weight = random_packed(output_dims, input_dims)
    copies = max(2, math.ceil(walk_bytes / weight.nbytes))
    layers = [_layer(output_dims, input_dims, weight) for _ in range(copies)]
    inputs = {count: mx.random.normal((count, input_dims)) for count in rows}
    mx.eval(inputs)
    own: dict[int, list[float]] = {count: [] for count in rows}
    read: dict[int, list[float]] = {count: [] for count in rows}
    for n in range(-1, rounds):
        for count in rows:
            plain = reader.seconds([layer.weight for layer in layers], READINGS) / copies
            product = _walk(layers, inputs[count]) / copies
            # the first round starts threads and touches pages
            if n >= 0:
                own[count].append(product)
                read[count].append(plain)
    return [
        ProductResult(
            output_dims,
            input_dims,
            count,
            copies,
            weight.nbytes,
            tuple(own[count]),
            tuple(read[count]),
        )
        for count in rows
    ]


def product_backend() -> str:
    """The backend that multiplies by ternary matrices here."""
    report = backend_report(
        "mlx_mmfree.ops.ternary_matmul", mx.zeros((1, 32)), random_packed(1, 32), codes=True
    )
    return next(name for name, reason in report.items() if reason is None)


def _layer(output_dims: int, input_dims: int, weight: mx.array) -> PackedBitLinear:
    layer = PackedBitLinear(input_dims, output_dims)
    layer.weight = mx.bitwise_or(weight, mx.array(0, mx.uint32))
    mx.eval(layer.parameters())
    return layer


def _walk(layers: list[PackedBitLinear], x: mx.array) -> float:
    start = time.perf_counter()
    for first in range(0, len(layers), _GROUP):
        mx.eval([layer(x) for layer in layers[first : first + _GROUP]])
    return time.perf_counter() - start
