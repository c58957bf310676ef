"""Records the graph of one decoded token, and what each of its arrays is."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...generation.reader import fixed_state, with_tails
from ...generation.states import blank_state
from ...layers.states import TAIL_SLOTS
from ...models import Decoder, check_causal
from ...ops.backend.compilation import without_fusion
from ...ops.backend.cost import Call
from ...ops.backend.graph import Graph, GraphNode, graph_of
from .primitives import VIEWS

_PASSING = {"CustomTransforms"}
"""Operations whose results are their last inputs; the results of other views are their first ones."""


class Recording:
    """The graph of one decoded token. Nothing is computed.

    Args:
        graph: The graph; its inputs are the token, the old state and the weights.
        names: The name of each weight by its index among the arrays.
        old_state: The indices of the old state.
        token: The index of the token.
        new_state: The indices of the new state.
        hidden: The index of the head's input.
        state_tree: The old state.

    Attributes:
        state_tree: As the argument.
        new_state: The indices of the new state.
        state: The arrays of the old and the new state, of which others are views.
        depends: Of each array, whether it depends on the token or the state.
        roots: Of each array, the weights that it is made of.
        following: Of each array, whether a block or the state had a part in it.
    """

    def __init__(
        self,
        graph: Graph,
        names: dict[int, str],
        token: int,
        old_state: list[int],
        new_state: list[int],
        hidden: int,
        state_tree: Any,
    ):
        self.graph, self.names, self.state_tree = graph, names, state_tree
        self._readers: dict[int, list[int]] = {}
        self._maker = {array: n for n, node in enumerate(graph.nodes) for array in node.outputs}
        self.new_state = new_state
        self.state = {*old_state, *map(self.origin, new_state)}
        old = set(old_state)
        changing = {token, *old}
        count = len(graph.arrays)
        self.depends = [index in changing for index in range(count)]
        self.following = [
            index in old or names.get(index, "").startswith("blocks.") for index in range(count)
        ]
        self.roots: list[frozenset[int]] = [
            frozenset() if self.depends[index] or index in self._maker else frozenset([index])
            for index in range(count)
        ]
        for node in graph.nodes:
            depends = any(self.depends[index] for index in node.inputs)
            following = any(self.following[index] for index in node.inputs)
            roots = frozenset().union(*(self.roots[index] for index in node.inputs))
            for index in node.outputs:
                self.depends[index], self.following[index] = depends, following
                # of what depends on the token, the weights are not asked for
                self.roots[index] = frozenset() if depends else roots
        self._before_head = self._ancestors([hidden, *new_state])

    def _ancestors(self, arrays: list[int]) -> set[int]:
        """The operations that arrays are made by."""
        found: set[int] = set()
        ahead = [self._maker[array] for array in arrays if array in self._maker]
        while ahead:
            node = ahead.pop()
            if node not in found:
                found.add(node)
                inputs = self.graph.nodes[node].inputs
                ahead += [self._maker[array] for array in inputs if array in self._maker]
        return found

    def call(self, number: int) -> Call:
        """An operation with its arrays."""
        node, arrays = self.graph.nodes[number], self.graph.arrays
        inputs, outputs = ([arrays[n] for n in indices] for indices in (node.inputs, node.outputs))
        return Call(node.name, inputs, outputs, node.given, node.options)

    def origin(self, array: int) -> int:
        """The array that another one is a view of; itself, if it is no view."""
        while array in self._maker:
            node = self.graph.nodes[self._maker[array]]
            if node.name not in VIEWS or not node.inputs:
                break
            nth = node.outputs.index(array)
            nth = nth - len(node.outputs) if node.name in _PASSING else nth
            array = node.inputs[nth if -len(node.inputs) <= nth < len(node.inputs) else 0]
        return array

    def bytes_of(self, array: int) -> int:
        """The bytes that are read of an array: of one that was repeated, those that there are."""
        return min(self.graph.arrays[index].nbytes for index in (array, self.origin(array)))

    def is_weight(self, array: int) -> bool:
        """Returns whether an array is stored by the model, and not made for the token."""
        return array not in self._maker and not self.depends[array]

    def maker(self, array: int) -> GraphNode | None:
        """The operation that makes an array; `None` for what was there before."""
        found = self._maker.get(array)
        return None if found is None else self.graph.nodes[found]

    def readers(self, array: int) -> list[int]:
        """The operations that read an array, or a view of it."""
        if not self._readers:
            for number, node in enumerate(self.graph.nodes):
                if node.name not in VIEWS - {"Depends"}:
                    for index in {self.origin(index) for index in node.inputs}:
                        self._readers.setdefault(index, []).append(number)
        return self._readers.get(array, [])

    def makers(self, array: int) -> list[GraphNode]:
        """All operations that an array is made by."""
        return [self.graph.nodes[number] for number in self._ancestors([array])]

    def is_outside(self, number: int, array: int | None) -> bool:
        """Returns whether an operation stands before the first block or after the last.

        Args:
            number: Its index among the operations.
            array: What it applies to the activations, whose name may tell that it is of a block.
        """
        if array is not None:
            of_blocks = (
                self.names.get(root, "").startswith("blocks.") for root in self.roots[array]
            )
            if any(of_blocks):
                return False
        if number not in self._before_head:
            return True
        inputs = [index for index in self.graph.nodes[number].inputs if index != array]
        return not any(self.following[index] for index in inputs)

    def name_of(self, array: int) -> str:
        """The weight that an array is made of, without the name of the parameter."""
        roots = sorted(self.roots[array], key=lambda root: self.graph.arrays[root].nbytes)
        name = self.names.get(roots[-1], "") if roots else ""
        layer, _, parameter = name.rpartition(".")
        return (layer if parameter in ("weight", "scales", "biases") else name) or "a constant"


def record(model: Decoder, position: int, *, has_tails: bool = False) -> Recording:
    """Records how a model decodes the token after so many others, one text alone, on the CPU.

    Args:
        model: Its weights need no values.
        position: The tokens before it.
        has_tails: Whether keys and values go into tails, as on Metal.

    Raises:
        UnsupportedModelError: The model cannot continue a text.
        BackendError: The compiled extension, which reads the graph, cannot be used.
    """
    check_causal(model)
    with mx.stream(mx.cpu), without_fusion():
        token = mx.zeros((1, 1), mx.uint32)
        # with capacity for the token, so that nothing is copied to make it
        fixed, capacities = fixed_state(model, blank_state(model, 1, position))
        kinds = [mixer.state_kind for mixer in model.token_mixers]
        pairs = zip(kinds, fixed, capacities, strict=True) if capacities else ()
        state = tuple(kind.growing(part, capacity) for kind, part, capacity in pairs) or fixed
        if has_tails and capacities:
            state = with_tails(model, fixed, TAIL_SLOTS)
        arguments = model.block_arguments()
        hidden, new_state = model.hidden(token, state, block_arguments=arguments)
        logits = model.logits(hidden)
    named = {
        **{name: array for name, array in _arrays(model.parameters())},
        **{f"blocks.{name}": array for name, array in _arrays(arguments)},
    }
    old = [array for _, array in _arrays(state)]
    new = [array for _, array in _arrays(new_state)]
    inputs = [token, *old, *named.values()]
    graph = graph_of([logits, hidden, *new, *inputs], inputs)
    _, last, *states = graph.results
    after, before = states[: len(new)], states[len(new) :]
    names = dict(zip(before[1 + len(old) :], named, strict=True))
    return Recording(graph, names, before[0], before[1 : 1 + len(old)], after, last, state)


def _arrays(tree: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(tree)
    return [(name, array) for name, array in flat if isinstance(array, mx.array)]
