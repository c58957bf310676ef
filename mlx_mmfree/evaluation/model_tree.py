"""The parts of a model as a tree, with what each holds."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..layers.matrix import matrix_of


class Part(NamedTuple):
    """A module of a model, or several in a row that are alike.

    Attributes:
        path: Where it stands, empty for the model itself.
        name: The last word of the path.
        kind: Its class.
        shape: That of its matrix or its only array; empty where there is none.
        parameters: Numbers that it and its parts stand for: of a packed matrix its trits.
        nbytes: Bytes of its arrays and those of its parts.
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
        # scales and codes are the form of the matrix, not parameters beside it
        own = bias + (shape[0] * shape[1] if not matrix.is_shared else 0)
    elif len(arrays) == 1 and not parts:
        shape = next(iter(arrays.values())).shape
    else:
        leaves = [_leaf(array, f"{path}.{key}".lstrip("."), key) for key, array in arrays.items()]
        parts, arrays, own = (*parts, *leaves), {}, 0
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
    """A part and all that it consists of, each behind what holds it."""
    yield part
    for each in part.parts:
        yield from all_parts(each)


def tree_rows(part: Part) -> list[tuple[str, Part]]:
    """Lines of the tree, in which parts of a list that are alike stand once, with their numbers."""
    rows = [(part.name, part)]
    groups = _alike(part.parts)
    for number, (name, first) in enumerate(groups):
        is_last = number == len(groups) - 1
        for line, (below, each) in enumerate(tree_rows(first._replace(name=name))):
            branch = ("└─ " if is_last else "├─ ") if line == 0 else ("   " if is_last else "│  ")
            rows.append((branch + below, each))
    return rows


def _alike(parts: Sequence[Part]) -> list[tuple[str, Part]]:
    """Each part with its name; those in a row that are alike as one, which counts them all."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and "." in part.name and _form(groups[-1][0]) == _form(part):
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


def _form(part: Part) -> tuple[object, ...]:
    """What parts that are alike have in common."""
    inner = tuple((each.name, _form(each)) for each in part.parts)
    return part.kind, part.shape, part.parameters, part.nbytes, inner
