"""Samplers: functions from logits `(B, V)` to the chosen tokens `(B,)`.

Random choices use MLX's global generator: `mx.random.seed` makes them repeatable. A `Draw` can also
take its random numbers from a caller who gives each row its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..ops import long_cumsum, relative_weights
from . import filters

Sampler = Callable[[mx.array], mx.array]
"""What chooses a token for each text: takes logits `(B, V)` and returns token ids `(B,)`.

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
    steps: tuple[filters.Filter, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temp < math.inf:
            raise ValueError(
                f"[temperature] 'temp' must be positive and finite but got {self.temp}."
            )

    def scores(self, logits: mx.array, chance: mx.array | None = None) -> mx.array:
        """Logarithms of the probabilities, up to a constant of each row.

        Args:
            logits: Those of the model, `(B, V)`.
            chance: Uniform numbers `(B, 1)` for a filter that draws; `None`: MLX's generator gives them.
        """
        for keep in self.steps:
            logits = keep(logits, chance) if isinstance(keep, filters.XTC) else keep(logits)
        # The largest logit becomes 0, so that a tiny temperature does not overflow.
        return (logits - mx.max(logits, axis=-1, keepdims=True)) / self.temp

    def __call__(self, logits: mx.array) -> mx.array:
        return mx.random.categorical(self.scores(logits))

    def at(self, logits: mx.array, chances: mx.array) -> mx.array:
        """The tokens that uniform numbers below 1 point to, `(B, 2)`, two for each row.

        The second one is looked up among the sums of the probabilities; the first is for the filters.
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


def chain(steps: Sequence[filters.Filter], sampler: Sampler) -> Sampler:
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
        ValueError: A value is out of its bounds.

    Example:
        >>> make_sampler(temp=0.8, top_p=0.95)(mx.array([[0.0, 9.0]])).tolist()
        [1]
    """
    if not 0 <= temp < math.inf:
        raise ValueError(f"[make_sampler] 'temp' must be a finite number from 0 but got {temp}.")
    used: list[filters.Filter] = []
    if top_p != 1:
        used.append(filters.TopP(top_p))
    likely_enough = filters.MinP(min_p, min_tokens_to_keep)
    if min_p:
        used.append(likely_enough)
    surprise = filters.XTC(xtc_probability, xtc_threshold, tuple(xtc_special_tokens))
    if xtc_probability:
        used.append(surprise)
    if top_k:
        used.append(filters.TopK(top_k))
    return chain(used, temperature(temp)) if temp else greedy
