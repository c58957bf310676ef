"""The texts that were used last, within a limit of bytes."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from .keys import TextKey

Value = TypeVar("Value")


class _Entry(NamedTuple, Generic[Value]):
    value: Value
    nbytes: int
    serves: list[TextKey]


class RecentTexts(Generic[Value]):
    """A table of texts that forgets those that were used longest ago.

    What belongs to a text may also serve prefixes of it, which then have nothing of their own.

    Args:
        limit: Bytes at most.

    Attributes:
        nbytes: Bytes of all values.
        lengths: How many texts there are of each length, prefixes that are served included.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.nbytes = 0
        self.lengths: Counter[int] = Counter()
        self._entries: OrderedDict[TextKey, _Entry[Value]] = OrderedDict()
        # which entries serve a text, the newest last
        self._holders: dict[TextKey, dict[TextKey, None]] = {}

    def __len__(self) -> int:
        """The number of values."""
        return len(self._entries)

    def __iter__(self) -> Iterator[TextKey]:
        """The texts that have a value of their own."""
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._holders

    def get(self, key: TextKey) -> tuple[TextKey, Value] | None:
        """The state that serves a text, which then counts as used last, and its own text."""
        holders = self._holders.get(key)
        if holders is None:
            return None
        holder = next(reversed(holders))
        self._entries.move_to_end(holder)
        return holder, self._entries[holder].value

    def add(
        self, key: TextKey, value: Value, nbytes: int, prefixes: Sequence[TextKey] = ()
    ) -> list[TextKey]:
        """Takes what belongs to a text, in place of what belonged to it before.

        Args:
            key: The text.
            value: What belongs to it.
            nbytes: Bytes of the value.
            prefixes: Shorter texts that it serves, too.

        Returns:
            The texts that had to go: the new one alone, if it is larger than the limit.
        """
        self.remove(key)
        if nbytes > self.limit:
            return [key]
        for prefix in prefixes:
            self.remove(prefix)
        self._entries[key] = _Entry(value, nbytes, [])
        self.nbytes += nbytes
        self.serve(key, [key, *prefixes])
        gone = []
        while self.nbytes > self.limit:
            gone.append(next(iter(self._entries)))
            self.remove(gone[-1])
        return gone

    def serve(self, key: TextKey, prefixes: Iterable[TextKey]) -> None:
        """Lets what belongs to a text, if there is something, serve prefixes of it too."""
        entry = self._entries.get(key)
        if entry is None:
            return
        for served in prefixes:
            holders = self._holders.setdefault(served, {})
            if not holders:
                self.lengths[served.length] += 1
            if key not in holders:
                holders[key] = None
                entry.serves.append(served)

    def remove(self, key: TextKey) -> None:
        """Forgets what belongs to a text, if there is something."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.nbytes -= entry.nbytes
        for served in entry.serves:
            del self._holders[served][key]
            if not self._holders[served]:
                del self._holders[served]
                self.lengths[served.length] -= 1
                if not self.lengths[served.length]:
                    del self.lengths[served.length]
