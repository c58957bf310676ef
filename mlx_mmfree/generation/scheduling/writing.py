"""Requests, what becomes of them, and the rows that are written: all read one token a step."""

from collections.abc import Collection, Sequence

import mlx.core as mx

from ...models import Decoder
from ...ops.device import on_cpu
from ..decode import STEPS_PER_CACHE_CLEARING
from ..states import state_before
from .batches import Batches, _Group
from .choices import Choice, Logprobs
from .rows import Row, State


class Writing:
    """Rows that are written: while one step's tokens are handled, the next is computed.

    Args:
        model: Gives the logits.
        known: How many tokens have a text.
        keeps: Whether states of rows are to be kept.
    """

    def __init__(self, model: Decoder, known: int, keeps: bool = False):
        self._model = model
        self._is_on_cpu = on_cpu()
        self._batches = Batches(model, known, keeps)
        self._groups: list[_Group] = []
        self._tokens = mx.zeros((0,), mx.uint32)
        # the processors have not seen them yet
        self._are_new = False
        self._steps = 0
        self.rows: list[Row] = []

    def join(self, rows: Sequence[Row], states: Sequence[State]) -> None:
        """Takes rows in, whose states are those after all of their tokens but the last.

        Args:
            rows: The rows.
            states: The state of each, for a batch of one in the ordinary variant.
        """
        self._look_at_chosen()
        for index, row in enumerate(rows, len(self.rows)):
            wanted = row.request.sampler, list(row.request.processors)
            alike = (g for g in self._groups if (g.sampler, g.processors) == wanted)
            group = next(alike, None)
            if group is None:
                group = _Group(*wanted)
                self._groups.append(group)
            group.add(index, row)
        read = [row.read for row in rows]
        last = mx.array([tokens[-1] for tokens in read], mx.uint32)
        self._tokens = mx.concatenate([self._tokens, last])
        indices = range(len(self.rows), len(self.rows) + len(rows))
        self.rows += rows
        by_index = dict(zip(indices, states, strict=True))
        self._batches.join(by_index, [len(tokens) - 1 for tokens in read])

    def state_of(self, row: Row) -> State:
        """The model's state after the tokens of a row that it has read, for a batch of one."""
        return self._batches.state_of([self.rows.index(row)])

    def key_of(self, row: Row) -> mx.array:
        """The key of a row's next random numbers."""
        index = self.rows.index(row)
        [group] = (group for group in self._groups if index in group.indices)
        return group.keys[group.indices.index(index)]

    def hold(self) -> None:
        """Holds the states before what is, or may become, the stop string of a row."""
        for index, row in enumerate(self.rows):
            if not row.completion.is_cut:
                row.before_stop = None
            elif row.before_stop is None:
                row.before_stop = len(row.read) - 1, self._batches.before_last(index)

    def reusable(self, row: Row) -> list[tuple[list[int], State]]:
        """The tokens of a row that another text may begin with, and the state after them.

        What has ended a text is no part of it: the end token, or a stop string. Where the last token
        may yet complete one, both are given.
        """
        index = self.rows.index(row)
        read, state = row.read, self._batches.state_of([index])
        has_ended = row.completion.finish_reason is not None
        if not has_ended and row.before_stop is None:
            return [(read, state)]
        count, states = row.before_stop or (len(read) - 1, self._batches.before_last(index))
        before = state_before(self._model, state, len(read), len(read) - count, states)
        if before is None:
            return [(read, state)]
        return [(read[:count], before), *([] if has_ended else [(read, state)])]

    def drop(self, leaving: Collection[Row]) -> None:
        """Drops rows."""
        going = [n for n, row in enumerate(self.rows) if row not in leaving]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[n] for n in going]
        self._look_at_chosen()
        new_indices = {index: n for n, index in enumerate(going)}
        for group in self._groups:
            group.keep(new_indices)
        self._groups = [group for group in self._groups if group.indices]
        self._batches.keep(going)
        self._tokens = self._tokens[mx.array(going, mx.uint32)]

    def step(self) -> Choice:
        """Starts to compute the next token of each row, of which there is one at least."""
        before = [batch.reader.arrays for batch in self._batches.by_stage.values()]
        logits, finite = self._batches.read(self._tokens)
        if self._is_on_cpu:
            # its memory is written to in place once nothing is to compute it any more
            mx.eval(before)
        del before
        state = [batch.reader.arrays for batch in self._batches.by_stage.values()]
        if self._is_on_cpu:
            # apart, so that the state can be waited for while the logits are computed: whatever is
            # started together is held until all of it is there
            mx.async_eval(state)
            state = []
        self._look_at_chosen()
        failures: dict[int, Exception] = {}
        chosen = []
        for group in self._groups:
            try:
                chosen.append(group.choose(logits))
            except Exception as error:
                failures |= dict.fromkeys(group.indices, error)
                chosen.append(mx.zeros((len(group.indices),), mx.uint32))
        self._tokens = chosen[0]
        if len(chosen) > 1:
            order = [index for group in self._groups for index in group.indices]
            back = mx.argsort(mx.array(order))
            self._tokens = mx.concatenate(chosen)[back]
        self._are_new = True
        counts = {
            index: row.request.top_logprobs
            for index, row in enumerate(self.rows)
            if row.request.top_logprobs is not None
        }
        logprobs = Logprobs(logits, self._tokens, counts) if counts else None
        shown = [] if logprobs is None else logprobs.arrays
        drawn = [(group.seen, group.keys) for group in self._groups]
        mx.async_eval([self._tokens, finite, *shown], drawn, state)
        self._steps += 1
        if self._steps % STEPS_PER_CACHE_CLEARING == 0:
            mx.clear_cache()
        return Choice(list(self.rows), self._tokens, finite, failures, logprobs)

    def _look_at_chosen(self) -> None:
        """Lets the processors see the tokens chosen last.

        As late as possible: one that must wait for a token then does so while the model reads it.
        """
        if self._are_new:
            self._are_new = False
            for group in self._groups:
                tokens = group.part_of(self._tokens)
                try:
                    group.seen = [
                        process.update(seen, tokens)
                        for process, seen in zip(group.processors, group.seen, strict=True)
                    ]
                except Exception as error:
                    group.error = error
