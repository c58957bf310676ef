"""How the rows of a batch choose their tokens, each with its own sampler, penalties and numbers."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..penalties import LogitsProcessor
from ..samplers import Draw, Sampler
from .row import Row

State = Any
Failures = dict[int, Exception]


class Choosing:
    """Chooses the next token of each row of a batch.

    Rows whose samplers and processors are equal choose together. A row's token depends on its own
    logits, history and numbers alone, whoever its neighbours are.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._chosen: mx.array | None = None

    @property
    def arrays(self) -> Any:
        """What is to be computed for the next step."""
        return [(group.seen, group.keys) for group in self._groups]

    def join(self, rows: Sequence[Row], first: int) -> None:
        """Takes rows in, which are behind the others from `first`."""
        self._look_at_chosen()
        for place, row in enumerate(rows, first):
            sampler, processors = row.request.sampler, row.request.processors
            group = next((g for g in self._groups if g.is_alike(sampler, processors)), None)
            if group is None:
                group = _Group(sampler, processors)
                self._groups.append(group)
            group.add(place, row.seen, row.key)

    def keep(self, places: Sequence[int]) -> None:
        """Drops all rows but these."""
        self._look_at_chosen()
        new_places = {place: n for n, place in enumerate(places)}
        for group in self._groups:
            group.keep(new_places)
        self._groups = [group for group in self._groups if group.places]

    def choose(self, logits: mx.array) -> tuple[mx.array, Failures]:
        """The tokens that follow, uint32 `(B,)`, and which rows failed.

        Args:
            logits: Those of all rows, float32 `(B, V)`.
        """
        self._look_at_chosen()
        failures: Failures = {}
        chosen = []
        for group in self._groups:
            try:
                chosen.append(group.choose(group.part_of(logits)).astype(mx.uint32))
            except Exception as error:
                failures |= dict.fromkeys(group.places, error)
                chosen.append(mx.zeros((len(group.places),), mx.uint32))
        if len(chosen) == 1:
            self._chosen = chosen[0]
        else:
            order = [place for group in self._groups for place in group.places]
            back = mx.argsort(mx.array(order))
            self._chosen = mx.concatenate(chosen)[back]
        return self._chosen, failures

    def _look_at_chosen(self) -> None:
        """Lets the processors see the tokens chosen last.

        As late as possible: one that must wait for a token then does so while the model reads it.
        """
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            for group in self._groups:
                group.look_at(group.part_of(chosen))


class _Group:
    """Rows whose samplers and processors are equal.

    Attributes:
        places: Which rows of the batch they are, ascending.
        seen: What each processor has seen, with these rows on axis 0.
        keys: The keys of the rows' random numbers, `(N, 2)`.
    """

    def __init__(self, sampler: Sampler, processors: Sequence[LogitsProcessor]):
        self._sampler = sampler
        self._processors = list(processors)
        self._error: Exception | None = None
        self.places: list[int] = []
        self.seen: list[State] = []
        self.keys = mx.zeros((0, 2), mx.uint32)

    def is_alike(self, sampler: Sampler, processors: Sequence[LogitsProcessor]) -> bool:
        """Whether rows with these belong here."""
        return self._sampler == sampler and self._processors == list(processors)

    def part_of(self, array: mx.array) -> mx.array:
        """The rows of the group, of an array with all rows on axis 0."""
        return array if len(self.places) == array.shape[0] else array[mx.array(self.places)]

    def add(self, place: int, seen: list[State], key: mx.array) -> None:
        if self.places:
            seen = tree_map(lambda old, new: mx.concatenate([old, new]), self.seen, seen)
        self.places.append(place)
        self.seen = seen
        self.keys = mx.concatenate([self.keys, key[None]])

    def keep(self, new_places: dict[int, int]) -> None:
        kept = [n for n, place in enumerate(self.places) if place in new_places]
        if 0 < len(kept) < len(self.places):
            index = mx.array(kept)
            self.seen, self.keys = tree_map(lambda array: array[index], (self.seen, self.keys))
        self.places = [new_places[self.places[n]] for n in kept]

    def choose(self, logits: mx.array) -> mx.array:
        if self._error is not None:
            raise self._error
        for process, seen in zip(self._processors, self.seen, strict=True):
            logits = process(logits, seen)
        if not isinstance(self._sampler, Draw):
            return self._sampler(logits)
        pairs = mx.vmap(mx.random.split)(self.keys)
        self.keys = pairs[:, 0]
        chances = mx.vmap(lambda key: mx.random.uniform(shape=(2,), key=key))(pairs[:, 1])
        return self._sampler.at(logits, chances)

    def look_at(self, tokens: mx.array) -> None:
        try:
            self.seen = [
                process.update(seen, tokens)
                for process, seen in zip(self._processors, self.seen, strict=True)
            ]
        except Exception as error:
            self._error = error
