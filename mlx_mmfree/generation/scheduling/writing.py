"""The rows that are being written: all of them read one token a step."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import mlx.core as mx

from ...models import Decoder
from ..decode import STEPS_PER_CACHE_CLEARING
from ..finite import not_finite
from .batches import Batches
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
    """Rows that are written: while one step's tokens are handled, the next is computed.

    Args:
        model: Gives the logits.
    """

    def __init__(self, model: Decoder):
        self._is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._batches = Batches(model)
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
        self.rows += rows
        self._batches.join(states, [row.read_count - 1 for row in rows])

    def state_of(self, row: Row) -> State:
        """What the model keeps of the tokens of a row that it has read, for a batch of one."""
        return self._batches.state_of(self.rows.index(row))

    def leave(self, leaving: Collection[Row]) -> None:
        """Drops rows."""
        going = [n for n, row in enumerate(self.rows) if row not in leaving]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[n] for n in going]
        self._choosing.keep(going)
        self._batches.keep(going)
        self._tokens = self._tokens[mx.array(going, mx.uint32)]

    def step(self) -> Choice:
        """Starts to compute the next token of each row, of which there is one at least."""
        before = self._batches.arrays
        logits, finite = self._batches.read(self._tokens)
        if self._is_on_cpu:
            # its memory is written to in place once nothing is to compute it any more
            mx.eval(before)
        del before
        if self._is_on_cpu:
            # apart, so that the state can be waited for while the logits are computed: whatever is
            # started together is held until all of it is there
            mx.async_eval(self._batches.arrays)
        self._tokens, failures = self._choosing.choose(logits)
        wanted = [row.request.top_logprobs for row in self.rows]
        logprobs = Logprobs(logits, self._tokens, wanted)
        choice = Choice(self.rows, self._tokens, finite, logprobs, failures)
        state = [] if self._is_on_cpu else self._batches.arrays
        mx.async_eval(choice.arrays, self._choosing.arrays, state)
        self._steps += 1
        if self._steps % STEPS_PER_CACHE_CLEARING == 0:
            mx.clear_cache()
        return choice
