"""Translates between the names of tensors on disk, which are the Hub's, and the names in memory."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import compress, product
from typing import NamedTuple

import mlx.nn as nn

from ..layers.matrix import parameters
from ..models import architecture_of
from ..models.parts.architecture import Config, Copy, OlderName

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
# the scale of a packed linear, a tensor beside its `weight`
_SCALE_ON_DISK, _SCALE_IN_MEMORY = "weight_scale", "scale"


Layer = tuple[int, ...]
"""The numbers of a layer in names on disk: its own, and before it that of a stage if there are any."""

_BLOCK = re.compile(r"(?:stages\.(?:\{\}|[0-9]+)\.)?blocks\.\{\}")


class WeightNames:
    """Translates names by the table `weight_names` of an architecture.

    An entry that names a tensor covers it; an entry that names a module covers every tensor inside.

    Args:
        table: Patterns on disk to patterns in memory. `{}` stands for a number, and `None` marks unused
            tensors. An entry may say any of its numbers as they are. `Copy` and `OlderName` mark second
            names, which are read by `second_name` alone.
    """

    def __init__(self, table: Mapping[str, str | None]):
        second = {hub: ours for hub, ours in table.items() if isinstance(ours, Copy | OlderName)}
        # a second name stands for nothing in the first table, where it covers what is in its module
        self._to_memory = {**table, **dict.fromkeys(second, "")}
        self._second = {**dict.fromkeys(table, ""), **second}
        self._to_disk = {
            ours: hub for hub, ours in table.items() if ours is not None and hub not in second
        }

    def in_layer(self, disk_name: str) -> tuple[Layer, str] | None:
        """The layer of a tensor or module and its name in the layer; `None` outside of layers."""
        for pattern in _layer_patterns(tuple(self._to_disk.items())):
            if found := pattern.fullmatch(disk_name):
                *numbers, rest = found.groups()
                return tuple(map(int, numbers)), rest
        return None

    def is_unused(self, disk_name: str) -> bool:
        """Whether the architecture stores the tensor but never uses it."""
        entry = _longest_entry(disk_name, self._to_memory)
        return entry is not None and self._to_memory[entry.pattern] is None

    def to_memory(self, disk_name: str) -> str | None:
        """The name in memory; `None` if the table lacks the tensor or marks it unused or a copy."""
        return _translate(disk_name, self._to_memory, _SCALE_ON_DISK, _SCALE_IN_MEMORY)

    def second_name(self, disk_name: str) -> tuple[str, bool] | None:
        """What a second name stands for in memory, and whether it is a copy; `None` for other names."""
        name = _translate(disk_name, self._second, _SCALE_ON_DISK, _SCALE_IN_MEMORY)
        entry = _longest_entry(disk_name, self._second)
        if name is None or entry is None:
            return None
        return name, isinstance(self._second[entry.pattern], Copy)

    def to_disk(self, memory_name: str) -> str:
        """The name on disk.

        Raises:
            KeyError: The table has no entry for it.
        """
        name = self._on_disk(memory_name)
        if name is None:
            raise KeyError(memory_name)
        return name

    def module_to_memory(self, disk_name: str) -> str | None:
        """The path in memory of a module with a weight; `None` if the table lacks it."""
        name = self.to_memory(f"{disk_name}.weight")
        return None if name is None else name.removesuffix(".weight")

    def has_module(self, path: str) -> bool:
        """Whether a module with a weight has a name on disk."""
        return self._on_disk(f"{path}.weight") is not None

    def modules_to_disk(self, paths: Iterable[str]) -> dict[str, str]:
        """The names on disk of those modules with a weight that have one, by their paths."""
        names = {path: self._on_disk(f"{path}.weight") for path in paths}
        return {path: name.removesuffix(".weight") for path, name in names.items() if name}

    def module_to_disk(self, path: str) -> str:
        """The name on disk of a module with a weight.

        Raises:
            KeyError: The table has no entry for it.
        """
        return self.to_disk(f"{path}.weight").removesuffix(".weight")

    def _on_disk(self, memory_name: str) -> str | None:
        return _translate(memory_name, self._to_disk, _SCALE_IN_MEMORY, _SCALE_ON_DISK)


@lru_cache
def _layer_patterns(to_disk: tuple[tuple[str, str], ...]) -> list[re.Pattern[str]]:
    """What names on disk look like that lie in a layer, without repetitions."""
    heads: dict[str, None] = {}
    for ours, hub in to_disk:
        if found := _BLOCK.match(ours):
            parts = hub.split("{}")[: found.group().count("{}")]
            heads["([0-9]+)".join(map(re.escape, [*parts, ""]))] = None
    return [re.compile(head + r"\.(.+)") for head in heads]


class _Entry(NamedTuple):
    """An entry that covers a name.

    Attributes:
        pattern: The entry.
        rest: The rest of the name.
        numbers: What stands in the places of both.
    """

    pattern: str
    rest: str
    numbers: tuple[str, ...]


@lru_cache(maxsize=4096)
def _templates(name: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The name with places for some of its numbers, from all of them to none, and those numbers."""
    numbers = _NUMBER.findall(name)
    between = _NUMBER.split(name)
    found = []
    for are_places in product((True, False), repeat=len(numbers)):
        parts = ["{}" if p else n for p, n in zip(are_places, numbers, strict=True)]
        text = "".join(sum(zip(between, [*parts, ""], strict=True), ()))
        found.append((text, tuple(compress(numbers, are_places))))
    return tuple(found)


def _longest_entry(name: str, table: Mapping[str, str | None]) -> _Entry | None:
    """The longest entry that covers a name; `None` if there is none."""
    split = [(pattern.split("."), numbers) for pattern, numbers in _templates(name)]
    for length in range(len(split[0][0]), 0, -1):
        for parts, numbers in split:
            head = ".".join(parts[:length])
            if head in table:
                return _Entry(head, ".".join(parts[length:]), numbers)
    return None


def _translate(
    name: str, table: Mapping[str, str | None], scale_from: str, scale_to: str
) -> str | None:
    found = _longest_entry(name, table)
    if found is None or not (target := table[found.pattern]):
        return None
    module, dot, key = found.rest.rpartition(".")
    rest = module + dot + (scale_to if key == scale_from else key)
    result = f"{target}.{rest}" if rest else target
    for number in found.numbers:
        result = result.replace("{}", number, 1)
    return result


def weight_names(config: Config) -> WeightNames:
    """The names for a model with this configuration."""
    return WeightNames(architecture_of(config).weight_names)


def layer_numbers(model: nn.Module, names: WeightNames) -> dict[Layer, int]:
    """The place of each layer of a model, counted from the first."""
    places = (names.in_layer(names.to_disk(name)) for name in parameters(model))
    layers = sorted({place[0] for place in places if place is not None})
    return {layer: number for number, layer in enumerate(layers)}
