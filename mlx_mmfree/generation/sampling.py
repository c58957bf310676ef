"""How tokens are chosen: penalties on logits, filters of them, and samplers.

A `LogitsProcessor` carries what it has seen as arrays with the batch on axis 0, so that a decoding
step never waits for the host. Filters and samplers of equal arguments are equal, so that rows that share
them choose together. Random choices use MLX's global generator: `mx.random.seed` makes them repeatable.
A `Draw` can also take its random numbers from a caller who gives each row its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..arguments import check_list, check_numbers, check_whole, checks_names
from ..ops import log_softmax, long_cumsum, relative_weights

State = Any


class LogitsProcessor(Protocol):
    """Changes the logits of each step, given what was read and written so far.

    Texts whose processors are equal are handled as one batch.

    Example:
        >>> class Never:
        ...     def start(self, tokens, valid, vocab_size):
        ...         return mx.arange(vocab_size) == 0
        ...     def __call__(self, logits, state):
        ...         return mx.where(state, -mx.inf, logits)
        ...     def update(self, state, tokens):
        ...         return state
        >>> never: LogitsProcessor = Never()
        >>> never(mx.zeros((1, 3)), never.start(mx.array([[5]]), None, 3)).tolist()
        [[-inf, 0.0, 0.0]]
    """

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> State:
        """The state after the prompt: `tokens` `(B, L)`, left-padded where `valid` is `False`."""

    def __call__(self, logits: mx.array, state: State) -> mx.array:
        """The changed logits `(B, V)`."""

    def update(self, state: State, tokens: mx.array) -> State:
        """The state after the chosen `tokens` `(B,)`."""


@dataclass(frozen=True)
class RepetitionPenalty:
    r"""Makes the last tokens of prompt and text less likely (Keskar et al., arXiv 1909.05858).

    .. math::
        z_v \leftarrow z_v / p \text{ if } z_v > 0 \text{ else } z_v\,p

    Args:
        penalty: The factor :math:`p`; 1 changes nothing.
        context_size: How many of the last tokens count.

    Raises:
        ValueError: A number is out of its bounds.

    Example:
        >>> penalty = RepetitionPenalty(2.0)
        >>> state = penalty.start(mx.array([[1, 2]]), None, vocab_size=3)
        >>> penalty(mx.array([[1.0, 1.0, -1.0]]), state).tolist()
        [[1.0, 0.5, -2.0]]
    """

    penalty: float
    context_size: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.penalty < math.inf:
            raise ValueError(
                "[RepetitionPenalty] 'repetition_penalty' must be positive and finite but got "
                f"{self.penalty}."
            )
        if self.context_size < 1:
            raise ValueError(
                f"[RepetitionPenalty] 'repetition_context_size' must be at least 1 but got "
                f"{self.context_size}."
            )

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> mx.array:
        # Empty slots repeat the last token: it counts anyway, and no longer than they stay.
        last = tokens[:, -1:]
        if valid is not None:
            tokens = mx.where(valid, tokens, last)
        missing = max(0, self.context_size - tokens.shape[1])
        filler = mx.repeat(last, missing, axis=1)
        return mx.concatenate([filler, tokens[:, -self.context_size :]], axis=1)

    def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
        seen = mx.take_along_axis(logits, state, axis=-1)
        seen = mx.where(seen > 0, seen / self.penalty, seen * self.penalty)
        return mx.put_along_axis(logits, state, seen, axis=-1)

    def update(self, state: mx.array, tokens: mx.array) -> mx.array:
        return mx.concatenate([state[:, 1:], tokens[:, None].astype(state.dtype)], axis=1)


@dataclass(frozen=True)
class CountPenalty:
    r"""Makes tokens less likely that were already written, the prompt not counted.

    .. math::
        z_v \leftarrow z_v - f\,c_v - p\,[c_v > 0]

    with :math:`c_v` the number of times that token v was written.

    Args:
        presence: The penalty :math:`p`, once for a token that was written.
        frequency: The penalty :math:`f`, for each time.

    Raises:
        ValueError: A penalty is not finite.

    Example:
        >>> penalty = CountPenalty(presence=0.5, frequency=1.0)
        >>> state = penalty.start(mx.array([[0]]), None, vocab_size=3)
        >>> penalty(mx.zeros((1, 3)), penalty.update(state, mx.array([2]))).tolist()
        [[0.0, 0.0, -1.5]]
    """

    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("presence", "frequency"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise ValueError(f"[CountPenalty] '{name}_penalty' must be finite but got {value}.")

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> mx.array:
        return mx.zeros((tokens.shape[0], vocab_size))

    def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
        return logits - self.frequency * state - self.presence * (state > 0)

    def update(self, state: mx.array, tokens: mx.array) -> mx.array:
        return state + (mx.arange(state.shape[-1]) == tokens[:, None])


@dataclass(frozen=True)
class LogitBias:
    r"""Adds a number to the logits of some tokens.

    .. math::
        z_v \leftarrow z_v + b_v

    Args:
        biases: Token ids, each with its number :math:`b_v`; minus infinity forbids the token.

    Raises:
        ValueError: A token id is not a whole number from 0, or a number is NaN or infinity.

    Example:
        >>> bias = LogitBias(((1, 2.5),))
        >>> bias(mx.zeros((1, 3)), bias.start(mx.array([[0]]), None, vocab_size=3)).tolist()
        [[0.0, 2.5, 0.0]]
    """

    biases: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> "LogitBias":
        """The one of numbers by their token ids. Equal ones are equal in whatever order they come."""
        return cls(tuple(sorted(biases.items())))

    def __post_init__(self) -> None:
        for token, bias in self.biases:
            if not isinstance(token, int) or token < 0:
                raise ValueError(
                    f"[LogitBias] 'logit_bias' must have token ids from 0 but got {token!r:.60}."
                )
            if not bias < math.inf:
                raise ValueError(
                    "[LogitBias] 'logit_bias' must have finite numbers or minus infinity but got "
                    f"{bias} for token {token}."
                )

    def check(self, vocab_size: int) -> None:
        """Refuses token ids outside the vocabulary.

        Raises:
            ValueError: There is one.
        """
        largest = max((token for token, _ in self.biases), default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"[LogitBias] 'logit_bias' must have token ids below {vocab_size} but got {largest}."
            )

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> tuple[()]:
        self.check(vocab_size)
        return ()

    def __call__(self, logits: mx.array, state: tuple[()]) -> mx.array:
        ids, values = zip(*self.biases, strict=True)
        return logits.at[:, mx.array(ids)].add(mx.array(values, mx.float32))

    def update(self, state: tuple[()], tokens: mx.array) -> tuple[()]:
        return ()


PENALTIES = (
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "frequency_penalty",
)
"""The settings of sampling that `make_processors` takes; `make_sampler` takes the others."""


@checks_names
def make_processors(
    repetition_penalty: float = 1.0,
    repetition_context_size: int = 20,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
) -> list[LogitsProcessor]:
    """The bias and the penalties that are asked for, in this order.

    Args:
        repetition_penalty: Factor on the last tokens of prompt and text; 1 for none.
        repetition_context_size: How many of the last tokens it looks at.
        presence_penalty: Taken off the logit of a token that was written; 0 for none.
        frequency_penalty: Taken off for each time that a token was written; 0 for none.
        logit_bias: Numbers to add to the logits of tokens, by their ids.

    Returns:
        What `processors` of `generate` takes; empty if nothing is asked for.

    Raises:
        TypeError: An argument is misspelt or no number.
        ValueError: A value is out of its bounds.

    Example:
        >>> make_processors(repetition_penalty=1.1)
        [RepetitionPenalty(penalty=1.1, context_size=20)]
    """
    check_numbers(
        "make_processors",
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    check_whole("make_processors", repetition_context_size=repetition_context_size)
    if logit_bias is not None and not isinstance(logit_bias, Mapping):
        raise TypeError(
            "[make_processors] 'logit_bias' must be a mapping of ids to numbers, as {5: -1.0}, but got "
            f"{logit_bias!r:.80}."
        )
    processors: list[LogitsProcessor] = [LogitBias.of(logit_bias)] if logit_bias else []
    # a size that is out of bounds is refused in any case
    if repetition_penalty != 1 or repetition_context_size < 1:
        processors.append(RepetitionPenalty(float(repetition_penalty), repetition_context_size))
    if presence_penalty or frequency_penalty:
        processors.append(CountPenalty(float(presence_penalty), float(frequency_penalty)))
    return processors


Filter = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class TopP:
    """Keeps the fewest most likely tokens whose probabilities reach `mass` (arXiv 1904.09751)."""

    mass: float

    def __post_init__(self) -> None:
        if not 0 < self.mass <= 1:
            raise ValueError(f"[top_p] 'top_p' must be above 0 and at most 1 but got {self.mass}.")

    def __call__(self, logits: mx.array) -> mx.array:
        ordered = -mx.sort(-logits, axis=-1)
        probabilities = mx.exp(log_softmax(ordered))
        likelier = long_cumsum(probabilities) - probabilities
        count = mx.sum(likelier < self.mass, axis=-1, keepdims=True)
        least = mx.take_along_axis(ordered, count - 1, axis=-1)
        return mx.where(logits >= least, logits, -mx.inf)


@dataclass(frozen=True)
class MinP:
    """Keeps tokens at least `share` times as likely as the likeliest one (arXiv 2407.01082).

    Attributes:
        share: Between 0 and 1.
        min_tokens_to_keep: So many of the likeliest tokens stay in any case.
    """

    share: float
    min_tokens_to_keep: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"[min_p] 'min_p' must be between 0 and 1 but got {self.share}.")
        if self.min_tokens_to_keep < 1:
            raise ValueError(
                f"[min_p] 'min_tokens_to_keep' must be at least 1 but got {self.min_tokens_to_keep}."
            )

    def __call__(self, logits: mx.array) -> mx.array:
        distance = math.log(self.share) if self.share else -math.inf
        least = mx.max(logits, axis=-1, keepdims=True) + distance
        if self.min_tokens_to_keep > 1:
            count = min(self.min_tokens_to_keep, logits.shape[-1])
            likeliest = mx.topk(logits, count, axis=-1)
            least = mx.minimum(least, mx.min(likeliest, axis=-1, keepdims=True))
        return mx.where(logits >= least, logits, -mx.inf)


@dataclass(frozen=True)
class XTC:
    """Sometimes drops every token of probability above `threshold` but the least likely of them.

    Attributes:
        probability: How often a row is filtered, between 0 and 1.
        threshold: Between 0 and 0.5.
        exempt: Tokens that are never dropped, such as the end of text.
    """

    probability: float
    threshold: float
    exempt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(
                f"[xtc] 'xtc_probability' must be between 0 and 1 but got {self.probability}."
            )
        if not 0 <= self.threshold <= 0.5:
            raise ValueError(
                f"[xtc] 'xtc_threshold' must be between 0 and 0.5 but got {self.threshold}."
            )

    def __call__(self, logits: mx.array, chance: mx.array | None = None) -> mx.array:
        """The logits `(B, V)`, filtered where `chance` `(B, 1)`, uniform, is below the probability."""
        probabilities = mx.exp(log_softmax(logits))
        likely = mx.where(probabilities > self.threshold, probabilities, mx.inf)
        dropped = probabilities > mx.min(likely, axis=-1, keepdims=True)
        if self.exempt:
            ids = mx.arange(logits.shape[-1])[:, None]
            is_exempt = mx.any(ids == mx.array(list(self.exempt)), axis=-1)
            # not `&`, which MLX maps wrongly
            dropped = mx.logical_and(dropped, mx.logical_not(is_exempt))
        if chance is None:
            chance = mx.random.uniform(shape=(*logits.shape[:-1], 1))
        is_filtered = chance < self.probability
        return mx.where(mx.logical_and(is_filtered, dropped), -mx.inf, logits)


@dataclass(frozen=True)
class TopK:
    """Keeps the `count` most likely tokens, exactly so many also where logits are equal."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"[top_k] 'top_k' must be at least 1 but got {self.count}.")

    def __call__(self, logits: mx.array) -> mx.array:
        if self.count >= logits.shape[-1]:
            return logits
        others = mx.argpartition(-logits, kth=self.count - 1, axis=-1)[..., self.count :]
        return mx.put_along_axis(logits, others, mx.array(-mx.inf, logits.dtype), axis=-1)


Sampler = Callable[[mx.array], mx.array]
"""Chooses a token for each text: takes logits `(B, V)` and returns token ids `(B,)`.

Example:
    >>> second: Sampler = lambda logits: mx.argsort(-logits, axis=-1)[:, 1]
    >>> second(mx.array([[0.0, 9.0, 4.0]])).tolist()
    [2]
"""


def greedy(logits: mx.array) -> mx.array:
    r"""Takes the token with the largest logit, :math:`\mathrm{argmax}_v\,z_v`.

    Args:
        logits: `(B, V)`.

    Returns:
        Token ids `(B,)`.

    Example:
        >>> greedy(mx.array([[0.0, 9.0, 4.0]])).tolist()
        [1]
    """
    return mx.argmax(logits, axis=-1)


@dataclass(frozen=True)
class Draw:
    """Draws a token from `softmax(filtered logits / temp)`.

    Attributes:
        temp: Below 1 sharpens the distribution, above 1 flattens it. Positive.
        steps: Filters, applied in order before.
    """

    temp: float
    steps: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temp < math.inf:
            raise ValueError(
                f"[temperature] 'temp' must be positive and finite but got {self.temp}."
            )

    def scores(self, logits: mx.array, chance: mx.array | None = None) -> mx.array:
        """Logarithms of the probabilities, up to a constant of each row.

        Args:
            logits: The model's logits, `(B, V)`.
            chance: Uniform numbers `(B, 1)` for a filter that draws; `None`: MLX's generator gives them.
        """
        for keep in self.steps:
            logits = keep(logits, chance) if isinstance(keep, XTC) else keep(logits)
        # The largest logit becomes 0, so that a tiny temperature does not overflow.
        return (logits - mx.max(logits, axis=-1, keepdims=True)) / self.temp

    def __call__(self, logits: mx.array) -> mx.array:
        return mx.random.categorical(self.scores(logits))

    def at(self, logits: mx.array, chances: mx.array) -> mx.array:
        """The tokens that uniform numbers below 1 point to, `(B, 2)`, two for each row.

        The second one is looked up among the sums of the probabilities; the first is for `XTC`.
        """
        sums = long_cumsum(relative_weights(self.scores(logits, chances[:, :1])))
        # a number below 1 is below the whole sum
        return mx.sum(sums <= chances[:, 1:] * sums[:, -1:], axis=-1)


def temperature(value: float) -> Sampler:
    r"""Draws tokens at random.

    .. math::
        p_v = \frac{e^{z_v / T}}{\sum_u e^{z_u / T}}

    Args:
        value: :math:`T`. Below 1 sharpens the distribution, above 1 flattens it.

    Returns:
        A sampler that takes random numbers from MLX's generator; see `mx.random.seed`.

    Raises:
        ValueError: The value is not positive and finite.

    Example:
        >>> temperature(0.1)(mx.array([[0.0, 9.0, 4.0]])).tolist()
        [1]
    """
    return Draw(value)


def chain(steps: Sequence[Filter], sampler: Sampler) -> Sampler:
    """Lets filters change the logits before a sampler chooses.

    Args:
        steps: The filters, functions of logits `(B, V)` that return such, in their order.
        sampler: Chooses from what they leave.

    Returns:
        A sampler.

    Example:
        >>> ban = lambda logits: mx.where(mx.arange(3) == 1, -mx.inf, logits)
        >>> chain([ban], greedy)(mx.array([[0.0, 9.0, 4.0]])).tolist()
        [2]
    """
    if isinstance(sampler, Draw):
        return Draw(sampler.temp, (*steps, *sampler.steps))

    def sample(logits: mx.array) -> mx.array:
        for keep in steps:
            logits = keep(logits)
        return sampler(logits)

    return sample


@checks_names
def make_sampler(
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] = (),
) -> Sampler:
    """The usual sampler: top-p, min-p, XTC and top-k filters in this order, then temperature.

    Args:
        temp: Temperature; 0 takes the likeliest token and ignores the filters.
        top_p: Probability mass to keep; 1 keeps all.
        top_k: Number of tokens to keep; 0 keeps all.
        min_p: Least probability relative to the likeliest token; 0 keeps all.
        min_tokens_to_keep: How many tokens `min_p` keeps at least.
        xtc_probability: How often XTC filters; 0 never.
        xtc_threshold: Probability above which XTC drops tokens.
        xtc_special_tokens: Tokens that XTC never drops.

    Returns:
        What `sampler` of `generate` takes.

    Raises:
        TypeError: An argument is misspelt or no number.
        ValueError: A value is out of its bounds.

    Example:
        >>> make_sampler(temp=0.8, top_p=0.95)(mx.array([[0.0, 9.0]])).tolist()
        [1]
    """
    check_numbers(
        "make_sampler",
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
    )
    check_whole("make_sampler", top_k=top_k, min_tokens_to_keep=min_tokens_to_keep)
    check_list("make_sampler", "xtc_special_tokens", xtc_special_tokens, "ids")
    if not 0 <= temp < math.inf:
        raise ValueError(f"[make_sampler] 'temp' must be a finite number from 0 but got {temp}.")
    used: list[Filter] = []
    if top_p != 1:
        used.append(TopP(top_p))
    # numbers that are out of bounds are refused in any case
    if min_p or min_tokens_to_keep < 1:
        used.append(MinP(min_p, min_tokens_to_keep))
    if xtc_probability or not 0 <= xtc_threshold <= 0.5:
        used.append(XTC(xtc_probability, xtc_threshold, tuple(xtc_special_tokens)))
    if top_k:
        used.append(TopK(top_k))
    # MLX takes no whole numbers beyond 64 bits
    return chain(used, temperature(float(temp))) if temp else greedy
