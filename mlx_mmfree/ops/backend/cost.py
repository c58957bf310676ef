"""The units of costs: arithmetic by its kind and width, bytes, and products of matrices.

Each operation says itself what its compiled kernels take, by the shapes that a call declares. The
counts follow from the formulas of its docstring.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import mlx.core as mx

Kind = Literal["multiply", "add", "other", "integer"]
"""Multiplications and additions of floats (subtractions too); what else gives a float or compares floats
(divisions, roots, exponentials, maxima, roundings); and operations on integers."""


class Arithmetic(NamedTuple):
    """A kind of operation, and the bits of its numbers."""

    kind: Kind
    bits: int


Work = Counter[Arithmetic]


def work(
    *, multiply: int = 0, add: int = 0, other: int = 0, integer: int = 0, bits: int = 32
) -> Work:
    """Numbers of operations, all of the same width."""
    counts: dict[Kind, int] = {
        "multiply": multiply,
        "add": add,
        "other": other,
        "integer": integer,
    }
    return Counter({Arithmetic(kind, bits): count for kind, count in counts.items() if count})


class Product(NamedTuple):
    """A product of rows with a matrix, as an operation declares it.

    Attributes:
        inputs, outputs: The matrix maps so many numbers to so many.
        rows: Rows that it multiplies.
        times: How many matrices there are, each with rows of its own.
        operands: The indices of what is multiplied among the inputs of the operation, of which any that
            depends on weights alone is the matrix.
        is_ternary: The operation takes packed trits, and nothing else.
        work: What the product takes, which is part of the operation's work.
        around: The gate and norms before it in the same operation; `None` if it takes its input as is.
    """

    inputs: int
    outputs: int
    rows: int
    times: int
    operands: tuple[int, ...]
    is_ternary: bool
    work: Work
    around: str | None = None


@dataclass(frozen=True)
class Cost:
    """The cost of an operation.

    Attributes:
        work: Its arithmetic.
        products: The products in it.
        read: Bytes of inputs by their indices, where an input is not read as a whole.
        written: Bytes of outputs by their indices, where an output is not written as a whole.
    """

    work: Work = field(default_factory=Counter)
    products: tuple[Product, ...] = ()
    read: Mapping[int, int] = field(default_factory=dict)
    written: Mapping[int, int] = field(default_factory=dict)


class Call(NamedTuple):
    """An operation of a graph with its arrays.

    Attributes:
        name: What MLX calls it.
        inputs, outputs: Its arrays, of which shapes and dtypes alone are looked at.
        given: Which arguments are inputs; `None` for an operation of MLX.
        options: What it was called with beside arrays.
    """

    name: str
    inputs: Sequence[mx.array]
    outputs: Sequence[mx.array]
    given: Sequence[bool] | None = None
    options: Sequence[Any] = ()

    @property
    def indices(self) -> list[int | None]:
        """The index of each argument among the inputs, `None` where it was left out."""
        given = [True] * len(self.inputs) if self.given is None else self.given
        return [sum(given[:n]) if is_given else None for n, is_given in enumerate(given)]

    @property
    def arguments(self) -> list[Any]:
        """The arguments, `None` where they were left out."""
        return [None if index is None else self.inputs[index] for index in self.indices]


KERNEL_BITS = 32
"""Kernels compute in float32, and add up codes in 32 bits."""


def product_work(macs: int, bits: int = KERNEL_BITS) -> Work:
    """A multiplication and an addition for each pair of numbers that meet."""
    return work(multiply=macs, add=macs, bits=bits)


def affine_work(rows: int, inputs: int, outputs: int, groups: int, bits: int = KERNEL_BITS) -> Work:
    """A product with codes: sums for each group, which its scale and its bias finish."""
    macs, finished = rows * inputs * outputs, 2 * rows * outputs * groups
    return work(multiply=macs + finished, add=macs + finished, bits=bits)


def meeting(rows: int, inputs: int, outputs: int, count: int, operands: tuple[int, ...]) -> Product:
    """A product of activations with activations."""
    own = product_work(rows * inputs * outputs * count)
    return Product(inputs, outputs, rows, count, operands, False, own)


def norm_work(rows: int, dims: int, has_weight: bool) -> Work:
    """Squares, their mean with epsilon, its root, and what it is multiplied into."""
    multiply = (3 if has_weight else 2) * dims
    return work(multiply=rows * multiply, add=rows * dims, other=2 * rows)


def softmax_work(count: int) -> Work:
    """A maximum, differences, exponentials, their sum and quotients."""
    return work(add=2 * count, other=3 * count)
