"""The rows that are being written: all of them read one token a step, as a batch."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import mlx.core as mx

from ...models import Decoder
from ..decode import STEPS_PER_CACHE_CLEARING
from ..finite import not_finite
from ..key_values import joined_states, selected_rows
from ..reader import Reader
from .choosing import Choosing, Failures
from .logprobs import Logprobs
from .request import TokenLogprobs
from .row import Row

State = Any


class Choice:
    """What the rows of a step chose, yet to be computed.

    Args:
        rows: The rows of the batch at that step.
        tokens: One for each, `(B,)`.
        finite: Whether the logits of each were finite, `(B,)`.
        logprobs: Those that the rows asked for.
        failures: Why some rows have no token.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokens: mx.array,
        finite: mx.array,
        logprobs: Logprobs,
        failures: Failures,
    ):
        self._rows = list(rows)
        self.arrays = [tokens, finite, *logprobs.arrays]
        self._logprobs = logprobs
        self._failures = failures

    def results(self) -> list[tuple[Row, int | Exception, TokenLogprobs | None]]:
        """Each row with its token, or why it has none; waits until they are computed."""
        tokens, finite = (cast(list, array.tolist()) for array in self.arrays[:2])
        logprobs = self._logprobs.rows()
        return [
            (
                row,
                self._failures.get(n) or (token if is_finite else not_finite()),
                logprobs.get(n),
            )
            for n, (row, token, is_finite) in enumerate(
                zip(self._rows, tokens, finite, strict=True)
            )
        ]


class Writing:
    """A batch of rows that are written: while one step's tokens are handled, the next is computed.

    Args:
        model: Gives the logits.
    """

    def __init__(self, model: Decoder):
        self._model = model
        self._is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._reader: Reader | None = None
        self._choosing = Choosing()
        self._tokens = mx.zeros((0,), mx.uint32)
        self._steps = 0
        self.rows: list[Row] = []

    def join(self, rows: Sequence[Row], states: Sequence[State]) -> None:
        """Takes rows in, whose states are those after all of their tokens but the last.

        Args:
            rows: The rows.
            states: That of each, for a batch of one in the ordinary form.
        """
        self._choosing.join(rows, len(self.rows))
        last = mx.array([row.read[-1] for row in rows], mx.uint32)
        self._tokens = mx.concatenate([self._tokens, last])
        before = [cast(Reader, self._reader).state] if self.rows else []
        self.rows += rows
        self._go_on(joined_states(self._model, [*before, *states]))

    def state_of(self, row: Row, count: int) -> State:
        """What the model keeps of a row of which it has read `count` tokens, for a batch of one."""
        state = cast(Reader, self._reader).state
        return selected_rows(self._model, state, [self.rows.index(row)], count)

    def leave(self, leaving: Collection[Row]) -> None:
        """Drops rows."""
        going = [n for n, row in enumerate(self.rows) if row not in leaving]
        if len(going) == len(self.rows):
            return
        reader = cast(Reader, self._reader)
        state = reader.state
        self.rows = [self.rows[n] for n in going]
        self._choosing.keep(going)
        if not going:
            # the reader stays, for its graphs
            self._tokens, reader.arrays = mx.zeros((0,), mx.uint32), ()
            return
        self._tokens = self._tokens[mx.array(going)]
        longest = max(row.read_count for row in self.rows)
        self._go_on(selected_rows(self._model, state, going, longest))

    def step(self) -> Choice:
        """Starts to compute the next token of each row, of which there is one at least."""
        reader = cast(Reader, self._reader)
        before = reader.arrays
        logits, finite = reader.read(self._tokens)
        if self._is_on_cpu:
            # its memory is written to in place once nothing is to compute it any more
            mx.eval(before)
        del before
        if self._is_on_cpu:
            # apart, so that the state can be waited for while the logits are computed: whatever is
            # started together is held until all of it is there
            mx.async_eval(reader.arrays)
        self._tokens, failures = self._choosing.choose(logits)
        wanted = [row.request.top_logprobs for row in self.rows]
        logprobs = Logprobs(logits, self._tokens, wanted)
        choice = Choice(self.rows, self._tokens, finite, logprobs, failures)
        state = [] if self._is_on_cpu else reader.arrays
        mx.async_eval(choice.arrays, self._choosing.arrays, state)
        self._steps += 1
        if self._steps % STEPS_PER_CACHE_CLEARING == 0:
            mx.clear_cache()
        return choice

    def _go_on(self, state: State) -> None:
        if self._reader is None:
            self._reader = Reader(self._model, state)
        else:
            self._reader.go_on(state)
