"""Plain data in small chunks, none of which takes long, or much memory, to encode or to decode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

SIZE = 65_536
"""The most of a chunk, in about as many bytes of JSON."""
_EACH = 8


def chunks(value: Any) -> Iterator[tuple[str, Any]]:
    """The steps in which `Builder` makes a value."""
    if _capacity(value, SIZE) >= 0:
        yield "items", [value]
        return
    yield "begin", None
    if isinstance(value, list) and all(type(item) is int for item in value):
        few = SIZE // _EACH
        yield from (("items", value[start : start + few]) for start in range(0, len(value), few))
        yield "end", "list"
    elif isinstance(value, str | bytes):
        yield from (
            ("items", [value[start : start + SIZE]]) for start in range(0, len(value), SIZE)
        )
        yield "end", "text" if isinstance(value, str) else "bytes"
    elif isinstance(value, list | tuple):
        yield from _grouped(value)
        yield "end", "list" if isinstance(value, list) else "tuple"
    else:
        yield from _grouped(list(chain.from_iterable(value.items())))
        yield "end", "object"


def _grouped(items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    few: list[Any] = []
    capacity = SIZE
    for item in items:
        capacity = _capacity(item, capacity)
        if capacity < 0:
            yield "items", few
            few, capacity = [], _capacity(item, SIZE)
        if capacity < 0:
            yield from chunks(item)
            capacity = SIZE
        else:
            few.append(item)
    yield "items", few


def _capacity(value: Any, capacity: int) -> int:
    """The space that a value leaves; negative for one that does not fit, which is not read whole."""
    values = [value]
    while values and capacity >= 0:
        value = values.pop()
        capacity -= _EACH + (len(value) if isinstance(value, str | bytes) else 0)
        if isinstance(value, dict | list | tuple) and len(value) * _EACH > capacity:
            return -1
        if isinstance(value, dict):
            values += chain.from_iterable(value.items())
        elif isinstance(value, list | tuple):
            values += value
    return capacity


class Builder:
    """Makes a value of its chunks."""

    def __init__(self) -> None:
        self._open: list[list[Any]] = [[]]

    def add(self, step: Sequence[Any]) -> None:
        """Takes the next chunk."""
        match step:
            case "begin", None:
                self._open.append([])
            case "items", items:
                self._open[-1] += items
            case "end", kind:
                items = self._open.pop()
                self._open[-1].append(_KINDS[kind](items))

    @property
    def value(self) -> Any:
        """The value, once all chunks were taken."""
        ((value,),) = self._open
        return value


_KINDS: Mapping[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "object": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    "text": "".join,
    "bytes": b"".join,
}
