"""The tree of a model's parts, and the trits and scales of its ternary matrices."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..layers.matrix import matrices, matrix_of
from ..ops import unpack_ternary
from .picture import COLOURS, save_picture


class Part(NamedTuple):
    """A module of a model, or several in a row that are alike.

    Attributes:
        path: Where it stands, empty for the model itself.
        name: The last word of the path.
        kind: Its class.
        shape: That of its matrix or its only array; empty where there is none.
        parameters: Numbers that it and its parts stand for: of a packed matrix its trits.
        nbytes: Bytes of its arrays and its parts' arrays.
        parts: The modules in it.
    """

    path: str
    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    nbytes: int
    parts: tuple["Part", ...]

    @property
    def bits(self) -> float | None:
        """Bits for each parameter, with the scales beside them; `None` where there are none."""
        return 8 * self.nbytes / self.parameters if self.parameters else None


def model_tree(model: nn.Module) -> Part:
    """The tree of a model's modules."""
    return _part(model, "", "model")


def _part(module: nn.Module, path: str, name: str) -> Part:
    arrays = {
        key: value
        for key, value in module.items()
        if isinstance(value, mx.array) and not key.startswith("_")
    }
    parts = tuple(
        _part(child, f"{path}.{key}".lstrip("."), key) for key, child in _children(module)
    )
    matrix = matrix_of(module)
    own = sum(array.size for array in arrays.values())
    shape: tuple[int, ...] = ()
    if matrix is not None:
        shape = (matrix.output_dims, matrix.input_dims)
        bias = arrays["bias"].size if "bias" in arrays else 0
        # scales and codes are the format of the matrix, not parameters beside it
        own = bias + (shape[0] * shape[1] if not matrix.is_shared else 0)
    elif len(arrays) == 1 and not parts:
        shape = next(iter(arrays.values())).shape
    else:
        single = [_leaf(array, f"{path}.{key}".lstrip("."), key) for key, array in arrays.items()]
        parts, arrays, own = (*parts, *single), {}, 0
    return Part(
        path,
        name,
        type(module).__name__,
        shape,
        own + sum(part.parameters for part in parts),
        sum(array.nbytes for array in arrays.values()) + sum(part.nbytes for part in parts),
        parts,
    )


def _leaf(array: mx.array, path: str, name: str) -> Part:
    return Part(path, name, "array", array.shape, array.size, array.nbytes, ())


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, value in module.items():
        if key.startswith("_"):
            continue
        if isinstance(value, nn.Module):
            yield key, value
        elif isinstance(value, list):
            for number, child in enumerate(value):
                if isinstance(child, nn.Module):
                    yield f"{key}.{number}", child


def all_parts(part: Part) -> Iterator[Part]:
    """A part and all that it consists of, each after the part that holds it."""
    yield part
    for each in part.parts:
        yield from all_parts(each)


def tree_rows(part: Part) -> list[tuple[str, Part]]:
    """Lines of the tree, in which parts of a list that are alike stand once, with their numbers."""
    rows = [(part.name, part)]
    groups = _alike(part.parts)
    for number, (name, first) in enumerate(groups):
        head, rest = ("└─ ", "   ") if number == len(groups) - 1 else ("├─ ", "│  ")
        for line, (below, each) in enumerate(tree_rows(first._replace(name=name))):
            rows.append(((rest if line else head) + below, each))
    return rows


def _alike(parts: Sequence[Part]) -> list[tuple[str, Part]]:
    """Each part with its name; those in a row that are alike as one, which counts them all."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and "." in part.name and _format(groups[-1][0]) == _format(part):
            groups[-1].append(part)
        else:
            groups.append([part])
    found = []
    for group in groups:
        first, name = group[0], group[0].name
        if len(group) > 1:
            name = f"{first.name} to {group[-1].name.rpartition('.')[2]}, each"
        found.append((name, first))
    return found


def _format(part: Part) -> tuple[object, ...]:
    """The common properties of parts that are alike."""
    inner = tuple((each.name, _format(each)) for each in part.parts)
    return part.kind, part.shape, part.parameters, part.nbytes, inner


_ROWS_AT_A_TIME = 2**25
"""Trits that are unpacked at once."""
_IN_A_BLOCK = re.compile(r"(.*\b)blocks\.(\d+)\.(.+)")


class TritCounts(NamedTuple):
    """The trits of one matrix.

    Attributes:
        path: The layer.
        shape: Rows and columns.
        counts: How many are -1, 0 and 1.
        scales: The least, the mean and the largest scale; equal where there is one.
    """

    path: str
    shape: tuple[int, int]
    counts: tuple[int, int, int]
    scales: tuple[float, float, float]

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of -1, 0 and 1."""
        minus, zero, plus = (count / sum(self.counts) for count in self.counts)
        return minus, zero, plus

    @property
    def layer(self) -> int | None:
        """The number of its block, or `None` outside of blocks."""
        found = _IN_A_BLOCK.fullmatch(self.path)
        return int(found[2]) if found else None

    @property
    def kind(self) -> str:
        """Its path within a block, which its counterparts in other blocks have too."""
        found = _IN_A_BLOCK.fullmatch(self.path)
        return found[1] + found[3] if found else self.path


def count_trits(model: nn.Module) -> list[TritCounts]:
    """The trits of every packed ternary matrix of a model, in the order of its layers.

    Args:
        model: The model.

    Returns:
        For each matrix its path, shape, numbers of -1, 0 and 1, and scales.

    Example:
        >>> from mlx_mmfree import demo, load_model
        >>> first = count_trits(load_model(demo.path()))[0]
        >>> first.shape[0] * first.shape[1] == sum(first.counts)
        True
    """
    found = []
    for path, matrix in matrices(model).items():
        if matrix.holds_trits:
            layer: Any = matrix.layer
            shape = (matrix.output_dims, matrix.input_dims)
            scale = np.array(layer.scale, np.float64)
            scales = (float(scale.min()), float(scale.mean()), float(scale.max()))
            found.append(TritCounts(path, shape, _counts(layer.weight, shape), scales))
    return sorted(found, key=lambda each: _natural(each.path))


def _counts(weight: mx.array, shape: tuple[int, int]) -> tuple[int, int, int]:
    minus = plus = 0
    step = max(1, _ROWS_AT_A_TIME // shape[1])
    for start in range(0, shape[0], step):
        trits = np.array(unpack_ternary(weight[start : start + step], shape[1]))
        minus += int(np.count_nonzero(trits == -1))
        plus += int(np.count_nonzero(trits == 1))
    return minus, shape[0] * shape[1] - minus - plus, plus


def _natural(path: str) -> list[tuple[int, int | str]]:
    """A key by which `blocks.10` comes after `blocks.2`."""
    return [(0, int(word)) if word.isdigit() else (1, word) for word in path.split(".")]


def draw_trits(found: Sequence[TritCounts], title: str, image: Path) -> None:
    """Draws shares and scales over the layers, and the histogram of each kind of matrix, as PNG.

    Args:
        found: The matrices.
        title: The heading.
        image: The file.
    """
    from matplotlib.figure import Figure

    kinds: dict[str, list[TritCounts]] = {}
    for each in found:
        kinds.setdefault(each.kind, []).append(each)
    height = max(4.0, 1.6 + 0.32 * len(kinds))
    figure = Figure(figsize=(13, height), dpi=110, layout="constrained")
    histogram, zeros, scales = figure.subplots(1, 3)
    _draw_histogram(histogram, kinds)
    for axes, label in ((zeros, "share of zeros"), (scales, "scale (mean, with its range)")):
        axes.set(xlabel="layer", ylabel=label)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    depth = max((each.layer or 0 for each in found), default=0)
    for number, (kind, own) in enumerate(kinds.items()):
        # what stands in no block comes after the last
        layers = [depth + 1 if each.layer is None else each.layer for each in own]
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": _MARKERS[number // len(COLOURS) % len(_MARKERS)],
            "markersize": 4,
            "linewidth": 1,
            "label": kind,
        }
        zeros.plot(layers, [each.shares[1] for each in own], **style)
        least, mean, largest = zip(*(each.scales for each in own), strict=True)
        scales.plot(layers, mean, **style)
        scales.vlines(layers, least, largest, color=style["color"], linewidth=0.8)
    if any(each.layer is None for each in found):
        zeros.set_xlabel(f"layer ({depth + 1}: outside the blocks)")
    scales.set_ylim(bottom=0)
    scales.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    figure.suptitle(title, parse_math=False)
    save_picture(figure, image)


_MARKERS = ("o", "s", "^", "D", "v")


def _draw_histogram(axes: Any, kinds: dict[str, list[TritCounts]]) -> None:
    """The shares of all matrices of a kind, as a bar."""
    total = np.array([np.sum([each.counts for each in own], axis=0) for own in kinds.values()])
    shares = total / total.sum(axis=1, keepdims=True)
    left = np.zeros(len(kinds))
    for column, (label, colour) in enumerate(
        (("-1", COLOURS[0]), ("0", "0.85"), ("+1", COLOURS[1]))
    ):
        bars = axes.barh(range(len(kinds)), shares[:, column], left=left, color=colour, label=label)
        axes.bar_label(
            bars,
            [f"{share:.1%}" for share in shares[:, column]],
            label_type="center",
            fontsize=7,
            color="black" if label == "0" else "white",
        )
        left += shares[:, column]
    axes.set_yticks(range(len(kinds)), list(kinds), fontsize=7)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the weights, all layers together")
    axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
