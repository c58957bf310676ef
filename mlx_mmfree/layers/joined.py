"""Matrices of linears that share an input, joined where each product would be a launch of its own."""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.device import runs_metal_kernels
from .matrix import matrix_of

_ARRAYS = ("weight", "scales", "biases", "bias")


class JoinedLinears:
    """Linears of one format, whose rows lie one after the other in one array, of which theirs are views.

    It computes as long as the linears hold these views: not once one of them was given other weights.

    Args:
        linears: Linears of one `format`, whose arrays become views.
        is_lazy: Whether the joined arrays are left to be computed.

    Attributes:
        whole: One linear that gives the results of all, side by side.
        count: How many there are.
    """

    def __init__(self, linears: Sequence[nn.Module], *, is_lazy: bool = False):
        first = linears[0]
        self.whole = copy(first)
        self.count = len(linears)
        self._linears = tuple(linears)
        cuts = [0]
        for linear in linears:
            cuts.append(cuts[-1] + linear["weight"].shape[0])
        for name in _ARRAYS:
            if name in first:
                joined = mx.concatenate([linear[name] for linear in linears])
                parts = mx.split(joined, cuts[1:-1])
                if not is_lazy:
                    # the arrays of a pair of layers at a time are in memory twice
                    mx.eval(joined, parts)
                self.whole[name] = joined
                for linear, part in zip(linears, parts, strict=True):
                    linear[name] = part
        self._views = [[linear.get(name) for name in _ARRAYS] for linear in linears]

    def holds(self, linears: Sequence[nn.Module]) -> bool:
        """Returns whether these are the linears, with the weights that they had."""
        return len(linears) == self.count and all(
            given is own
            and all(given.get(name) is view for name, view in zip(_ARRAYS, views, strict=True))
            for given, own, views in zip(linears, self._linears, self._views, strict=True)
        )


def join_projections(model: nn.Module, *, is_lazy: bool = False) -> nn.Module:
    """Joins the projections of each mixer's input, on Metal, in place.

    A product of one row takes about as long as its launch in a small layer. Results are the same, and no
    array is in memory twice.

    Args:
        model: Its linears become views.
        is_lazy: Whether the joined arrays are left to be computed, where nobody asks for their values.

    Returns:
        The model.
    """
    if not runs_metal_kernels():
        return model
    for module in model.modules():
        linears = [module[name] for name in getattr(module, "projections", ())]
        for format, group in groupby(linears, _alike):
            alike = list(group)
            if format is not None and len(alike) > 1 and _rotate_alike(alike):
                # an ordinary attribute, since items of a module are parameters
                object.__setattr__(alike[0], "joined", JoinedLinears(alike, is_lazy=is_lazy))
    return model


def joined_parts(linears: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, int]]:
    """Linears that give the results of these, side by side, and of how many each."""
    place = 0
    while place < len(linears):
        first = linears[place]
        joined: JoinedLinears | None = vars(first).get("joined")
        if joined is None:
            yield first, 1
            place += 1
        elif joined.holds(linears[place : place + joined.count]):
            yield joined.whole, joined.count
            place += joined.count
        else:
            # other weights are trained or were given, and the old ones need no memory
            del first.joined


def _alike(linear: nn.Module) -> tuple[Any, ...] | None:
    """What linears have in common whose rows may lie in one array; `None`: others."""
    matrix = matrix_of(linear)
    return None if matrix is None else matrix.alike()


def _rotate_alike(linears: Sequence[nn.Module]) -> bool:
    signs = [linear["signs"] for linear in linears if "signs" in linear]
    return all(mx.array_equal(own, signs[0]).item() for own in signs)
