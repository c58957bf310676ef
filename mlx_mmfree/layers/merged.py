"""Matrices of linears that share an input, merged where each product would be a launch of its own."""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.device import runs_metal_kernels
from .matrix import matrix_of

_ARRAYS = ("weight", "scales", "biases", "bias")


class MergedLinears:
    """Linears of one format, whose rows lie one after the other in one array, of which theirs are views.

    It computes as long as the linears hold these views: not once one of them was given other weights.

    Args:
        linears: Linears of one `format`, whose arrays become views.
        is_lazy: Whether the merged arrays are left to be computed.

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
                merged = mx.concatenate([linear[name] for linear in linears])
                parts = mx.split(merged, cuts[1:-1])
                if not is_lazy:
                    # the arrays of a pair of layers at a time are in memory twice
                    mx.eval(merged, parts)
                self.whole[name] = merged
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


def merge_projections(model: nn.Module, *, is_lazy: bool = False) -> nn.Module:
    """Merges the projections of each mixer's input, on Metal, in place.

    A product of one row takes about as long as its launch in a small layer. Results are the same, and no
    array is in memory twice.

    Args:
        model: Its linears become views.
        is_lazy: Whether the merged arrays are left to be computed, where nobody asks for their values.

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
                object.__setattr__(alike[0], "merged", MergedLinears(alike, is_lazy=is_lazy))
    return model


def merged_parts(linears: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, int]]:
    """Linears that give the results of these, side by side, and of how many each."""
    index = 0
    while index < len(linears):
        first = linears[index]
        merged: MergedLinears | None = vars(first).get("merged")
        if merged is None:
            yield first, 1
            index += 1
        elif merged.holds(linears[index : index + merged.count]):
            yield merged.whole, merged.count
            index += merged.count
        else:
            # other weights are trained or were given, and the old ones need no memory
            del first.merged


def _alike(linear: nn.Module) -> tuple[Any, ...] | None:
    """A key that linears share whose rows may lie in one array; `None`: others."""
    matrix = matrix_of(linear)
    return None if matrix is None else matrix.alike()


def _rotate_alike(linears: Sequence[nn.Module]) -> bool:
    signs = [linear["signs"] for linear in linears if "signs" in linear]
    return all(mx.array_equal(own, signs[0]).item() for own in signs)
