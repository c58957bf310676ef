"""The graph of arrays that are yet to be computed."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ... import native


class GraphArray(NamedTuple):
    """An array of a graph: its number of bytes and its shape."""

    nbytes: int
    shape: tuple[int, ...]


class GraphNode(NamedTuple):
    """An operation: its name, and the places of its inputs and outputs among the arrays."""

    name: str
    inputs: list[int]
    outputs: list[int]


class Graph(NamedTuple):
    """What arrays will be computed of.

    Attributes:
        arrays: All arrays, the leaves first.
        nodes: The operations, each behind those that make its inputs.
        results: The places of the results among the arrays.
    """

    arrays: list[GraphArray]
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
    arrays, nodes, places = native.kernels().graph_of(list(results), list(leaves))
    return Graph(
        [GraphArray(size, tuple(shape)) for size, shape in arrays],
        [GraphNode(*node) for node in nodes],
        places,
    )
