"""The products of a decoded token, and what their matrices are: floats, codes, trits or activations."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from ...ops.backend.cost import Call, Cost, Work
from .primitives import VIEWS
from .record import Recording

_UNCHANGED = {*VIEWS, "AsType", "Concatenate", "Contiguous"}
"""Operations that leave the values of a matrix as they are, but for their precision."""

_AT_A_TIME = 2**24
"""Weights that are looked at together."""

Kind = Literal["ternary", "dense", "activations"]


class MatrixProduct(NamedTuple):
    """A product of a decoded token.

    Attributes:
        path: The layer that the matrix belongs to; of activations, the operation.
        operation: What MLX calls the operation that computes it.
        kind: Whether the matrix is ternary, has other weights, or is made of activations.
        storage: How the matrix is stored.
        inputs, outputs: The matrix maps so many numbers to so many.
        times: How many such products there are, with rows of several as one each.
        is_outside: It stands before the first block or after the last.
        work: What it takes.
        matrix_bytes: Bytes of the matrix; 0 for activations.
        is_stored: The matrix is read as the model stores it, and not made for each token.
        around: The gate and norms before it in the same operation; `None` if it takes its input as is.
        is_chosen: The token chooses the matrix from several.
    """

    path: str
    operation: str
    kind: Kind
    storage: str
    inputs: int
    outputs: int
    times: int
    is_outside: bool
    work: Work
    matrix_bytes: int
    is_stored: bool
    around: str | None = None
    is_chosen: bool = False

    @property
    def macs(self) -> int:
        """Pairs of numbers that meet."""
        return self.inputs * self.outputs * self.times


def products_of(recording: Recording, number: int, call: Call, cost: Cost) -> list[MatrixProduct]:
    """The products in one operation of a recorded token."""
    node = recording.graph.nodes[number]
    if not any(recording.depends[index] for index in node.outputs):
        return []
    if call.name in ("Multiply", "Divide"):
        return list(_spread(recording, number, call, cost))
    found = []
    for product in cost.products:
        operands = [node.inputs[n] for n in product.operands]
        found_weights = (_weights(recording, index) for index in operands)
        matrix = next((index for index in found_weights if index is not None), None)
        kind: Kind = "activations"
        storage, path = "activations", f"activations ({call.name})"
        if matrix is not None:
            is_ternary, storage = _matrix(recording, matrix, product.is_ternary, product.inputs)
            kind = "ternary" if is_ternary else "dense"
            path = recording.name_of(matrix)
        found.append(
            MatrixProduct(
                path,
                call.name,
                kind,
                storage,
                product.inputs,
                product.outputs,
                product.rows * product.times,
                recording.is_outside(number, matrix),
                product.work,
                0 if matrix is None else recording.bytes_of(matrix),
                matrix is not None and recording.is_weight(recording.origin(matrix)),
                product.around,
                matrix is not None and recording.graph.arrays[matrix].ndim > 2,
            )
        )
    return found


def _weights(recording: Recording, index: int) -> int | None:
    """The weights that meet activations, or codes of which the token chooses; `None`: activations."""
    if not recording.depends[index]:
        return index
    node = recording.maker(index)
    while node is not None and node.name in _UNCHANGED:
        index = node.inputs[0]
        node = recording.maker(index)
    if node is None or node.name != "Gather" or recording.depends[node.inputs[0]]:
        return None
    source = node.inputs[0]
    is_float = mx.issubdtype(recording.graph.arrays[source].dtype, mx.floating)
    return None if is_float else source


def _spread(recording: Recording, number: int, call: Call, cost: Cost) -> Iterator[MatrixProduct]:
    """A product that is written as a multiplication: activations are repeated to meet a matrix."""
    operands = recording.graph.nodes[number].inputs
    for matrix, other in (operands, operands[::-1]):
        if recording.depends[matrix] or not recording.depends[other]:
            continue
        shape = call.outputs[0].shape
        own, met = (_axes(recording, index, len(shape)) for index in (matrix, other))
        inputs, outputs = (prod(shape[axis] for axis in axes) for axes in (own & met, own - met))
        if inputs > 1 and outputs > 1:
            _, storage = _matrix(recording, matrix, False, inputs)
            yield MatrixProduct(
                recording.name_of(matrix),
                call.name,
                "dense",
                storage,
                inputs,
                outputs,
                call.outputs[0].size // (inputs * outputs),
                recording.is_outside(number, matrix),
                cost.work,
                recording.bytes_of(matrix),
                recording.is_weight(recording.origin(matrix)),
            )


def _axes(recording: Recording, index: int, count: int) -> set[int]:
    """The axes along which an array differs, of so many that its broadcast shape has."""
    node = recording.maker(index)
    while node is not None and node.name in ("Broadcast", "AsType"):
        index = node.inputs[0]
        node = recording.maker(index)
    shape = recording.graph.arrays[index].shape
    return {count - len(shape) + axis for axis, size in enumerate(shape) if size > 1}


def _matrix(recording: Recording, index: int, is_declared: bool, inputs: int) -> tuple[bool, str]:
    """Returns whether a matrix of weights is ternary, and how it is stored."""
    array = recording.graph.arrays[index]
    makers = {node.name for node in recording.makers(index)}
    is_raw = makers <= _UNCHANGED
    if is_declared:
        return True, "packed trits" if is_raw else "floats, packed for each token"
    if not mx.issubdtype(array.dtype, mx.floating):
        bits = array.nbytes * 8 // (inputs * prod(array.shape[:-1]))
        return False, f"codes of {bits} bit{'s' if bits > 1 else ''}"
    roots = [recording.graph.arrays[root] for root in recording.roots[index]]
    widest = max(roots, key=lambda root: root.nbytes, default=array)
    format = str(widest.dtype).rpartition(".")[2]
    # floats that a layer holds are multiplied as they are, whatever their values
    if is_raw and any(root in recording.names for root in recording.roots[index]):
        return False, format
    if not _has_trits(array):
        return False, format if is_raw else f"{format}, computed for each token"
    if is_raw:
        return True, "trits as floats"
    is_packed = not mx.issubdtype(widest.dtype, mx.floating)
    return True, f"{'packed trits' if is_packed else format}, made trits for each token"


def _has_trits(matrix: mx.array) -> bool:
    """Returns whether all values of a matrix are -s, 0 and s."""
    largest = 0.0
    for part in _parts(matrix):
        sizes = np.abs(np.array(part.astype(mx.float32)))
        largest = largest or float(sizes.max(initial=0.0))
        if not np.isin(sizes, (0.0, largest)).all():
            return False
    return True


def _parts(matrix: mx.array) -> Sequence[mx.array]:
    step = max(1, _AT_A_TIME * matrix.shape[0] // max(matrix.size, 1))
    return [matrix[start : start + step] for start in range(0, matrix.shape[0], step)]
