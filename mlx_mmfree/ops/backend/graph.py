"""The graph of arrays that are yet to be computed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ... import native


class GraphNode(NamedTuple):
    """An operation.

    Attributes:
        name: What MLX calls it.
        inputs: The indices of its inputs among the arrays.
        outputs: The same of its outputs.
        given: Which arguments of the call are inputs, in their order; the others were left out. `None`
            for an operation of MLX.
        options: What an operation of this library was called with beside arrays.
    """

    name: str
    inputs: list[int]
    outputs: list[int]
    given: list[bool] | None = None
    options: Sequence[Any] = ()


class Graph(NamedTuple):
    """The graph that arrays will be computed from.

    Attributes:
        arrays: All arrays, the leaves first.
        nodes: The operations, each after the ones that make its inputs.
        results: The indices of the results among the arrays.
    """

    arrays: list[mx.array]
    nodes: list[GraphNode]
    results: list[int]


def graph_of(results: Sequence[mx.array], leaves: Sequence[mx.array] = ()) -> Graph:
    """The graph of some arrays. Nothing is computed.

    Args:
        results: The arrays.
        leaves: Arrays at which the graph ends, whether they are known or not.

    Raises:
        BackendError: The compiled extension, which reads the graph, cannot be used.
    """
    arrays, nodes, indices = native.kernels().graph_of(list(results), list(leaves))
    return Graph(arrays, [GraphNode(*node) for node in nodes], indices)


def dispatches(name: str, inputs: int) -> int:
    """How many kernels MLX launches on a GPU for one of its operations that computes something.

    Each part of a concatenation is copied on its own, what is padded is filled before it is, and an
    index that is not known beforehand is computed first. An array that is written into is copied before,
    if something else holds it; that launch is left out.

    Args:
        name: What MLX calls the operation.
        inputs: How many arrays it takes.
    """
    found = {"Concatenate": inputs, "Pad": 2, "DynamicSlice": 2, "DynamicSliceUpdate": 2}
    return found.get(name, 1)
