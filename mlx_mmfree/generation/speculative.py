"""Speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

A small draft model proposes tokens one by one; the model reads them all at once and keeps those that
it would have chosen itself.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..models import Decoder
from .acceptance import accept_chosen, accept_drawn
from .decode import PREFILL_STEP_SIZE, Progress, prefill
from .draft_checks import check_draft
from .finite import check_finite
from .penalties import LogitsProcessor
from .rewinding import RewindingReader
from .samplers import Draw, Sampler, greedy

NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class DraftStats:
    """What a draft model was worth.

    Attributes:
        proposed: Tokens that it proposed.
        accepted: Those that the model kept.

    Example:
        >>> DraftStats(proposed=8, accepted=6).acceptance_rate
        0.75
    """

    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The share that was kept; 0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


class SpeculativeDecoding:
    """One text in the middle of decoding with a draft model; steps as `Decoding` does.

    Where the sampler is a `Draw`, with p the model's probabilities and q the draft's, a proposed
    token x is kept with probability :math:`\\min(1, p(x) / q(x))`; the first one that is not is drawn
    again from :math:`\\max(p - q, 0)`, so that every token is distributed as without a draft. Any
    other sampler, greedy included, chooses from the model's logits, and proposed tokens are kept as
    long as they are its choices.

    The model reads every proposal in one call, which is compiled where its state has a form of fixed
    shapes, and so are the steps of the draft model. Tokens that were refused are taken back.

    Args:
        model: Gives the logits.
        draft_model: Proposes tokens; has the same vocabulary.
        tokens: The prompt, integers `(1, L)`.
        num_draft_tokens: How many tokens are proposed at a time.
        state: What the model has read before the prompt.
        draft_state: What the draft model has read before it; `None`: nothing.
        sampler: Chooses tokens from logits, of both models.
        processors: Change the logits before, of both models.
        prefill_step_size: Positions of the prompt read at a time.
        progress: Called as each model reads the prompt.

    Raises:
        ValueError: The vocabularies differ or a number is too small.
    """

    def __init__(
        self,
        model: Decoder,
        draft_model: Decoder,
        tokens: mx.array,
        *,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        state: Any = None,
        draft_state: Any = None,
        sampler: Sampler = greedy,
        processors: Sequence[LogitsProcessor] = (),
        prefill_step_size: int = PREFILL_STEP_SIZE,
        progress: Progress | None = None,
    ):
        check_draft(model, draft_model)
        if num_draft_tokens < 1:
            raise ValueError(
                f"[speculative] 'num_draft_tokens' must be at least 1 but got {num_draft_tokens}."
            )
        self._count = num_draft_tokens
        self._sampler = sampler
        self._processors = processors
        options: dict[str, Any] = {"step_size": prefill_step_size, "progress": progress}
        self._target, self._draft = (
            RewindingReader(reader, prefill(reader, tokens[:, :-1], before, **options), self._count)
            for reader, before in (
                (model, model.init_state(1) if state is None else state),
                (draft_model, draft_model.init_state(1) if draft_state is None else draft_state),
            )
        )
        self._last = int(tokens[0, -1])
        # behind the last token that the draft model has read
        self._pending = [self._last]
        self._seen: Any = [p.start(tokens, None, model.vocab_size) for p in processors]
        self._ready: deque[tuple[int, bool]] = deque()
        self.stats = DraftStats()
        self.from_draft = False

    @property
    def num_ready(self) -> int:
        """How many tokens the next steps give without a computation."""
        return len(self._ready)

    @property
    def state(self) -> Any:
        """What the model has read, in the ordinary form; once none is ready, all tokens but the last."""
        return self._target.state

    def step(self, *, is_last: bool = False) -> list[int]:
        """The next token, as a batch of one.

        Args:
            is_last: No step follows, so nothing is proposed.
        """
        if not self._ready:
            self._ready.extend(self._round(0 if is_last else self._count))
        token, self.from_draft = self._ready.popleft()
        return [token]

    def _round(self, count: int) -> list[tuple[int, bool]]:
        """Proposes tokens and gives those that were kept and the one that follows them."""
        drafts, scores, seen = self._propose(count)
        tokens = mx.concatenate([mx.array([self._last], mx.int32), *drafts])
        logits, finite = self._target.read(tokens[None])
        # the positions are rows of a batch
        rows = tree_map(lambda *arrays: mx.concatenate(list(arrays)), *seen)
        logits = self._process(logits, rows)
        if isinstance(self._sampler, Draw):
            kept, new = accept_drawn(self._sampler.scores(logits), scores, drafts)
        else:
            kept, new = accept_chosen(self._sampler(logits), drafts)
        numbers = cast(list[int], mx.concatenate([kept, new, *drafts]).tolist())
        check_finite(finite)
        accepted, self._last, proposed = numbers[0], numbers[1], numbers[2:]
        self._target.take_back(count - accepted)
        self._settle_draft(accepted, proposed)
        self._seen = self._update(seen[accepted], new)
        mx.eval(self._target.arrays, self._draft.arrays, self._seen)
        self.stats = DraftStats(self.stats.proposed + count, self.stats.accepted + accepted)
        fresh = [*proposed[:accepted], self._last]
        return [(number, n < accepted) for n, number in enumerate(fresh)]

    def _propose(self, count: int) -> tuple[list[mx.array], list[mx.array], list[Any]]:
        """Tokens `(1,)`, their scores `(1, V)`, and the penalties before each and after the last."""
        seen = [self._seen]
        drafts: list[mx.array] = []
        scores: list[mx.array] = []
        tokens = mx.array(self._pending, mx.int32)
        for _ in range(count):
            logits, _ = self._draft.read(tokens[None])
            logits = self._process(logits[-1:], seen[-1])
            if isinstance(self._sampler, Draw):
                scores.append(self._sampler.scores(logits))
                chosen = mx.random.categorical(scores[-1])
            else:
                chosen = self._sampler(logits)
            tokens = chosen.astype(mx.int32)
            seen.append(self._update(seen[-1], tokens))
            drafts.append(tokens)
        return drafts, scores, seen

    def _settle_draft(self, accepted: int, proposed: list[int]) -> None:
        """Takes refused tokens back; the draft model has not read its last one."""
        count = len(proposed)
        if not count:
            self._pending.append(self._last)
            return
        read = min(accepted, count - 1)
        self._draft.take_back(count - 1 - read)
        self._pending = [*proposed[read:accepted], self._last]

    def _process(self, logits: mx.array, seen: Any) -> mx.array:
        for process, state in zip(self._processors, seen, strict=True):
            logits = process(logits, state)
        return logits

    def _update(self, seen: Any, tokens: mx.array) -> Any:
        return [
            process.update(state, tokens)
            for process, state in zip(self._processors, seen, strict=True)
        ]
