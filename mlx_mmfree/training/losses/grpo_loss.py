"""Group relative policy optimization: advantages of sampled answers and their loss."""

from dataclasses import dataclass, field, replace
from typing import Literal

import mlx.core as mx
import numpy as np

from ...models import Decoder
from ...ops import long_sum
from ..batches import Batch, padded_batch
from ..samples import Sample
from .loss import Loss, token_losses

GRPOLoss = Literal["grpo", "bnpo", "dr_grpo"]

_SMALLEST_DEVIATION = 1e-4


@dataclass(frozen=True)
class GroupBatch(Batch):
    """A batch of the answers of some groups, one in each row.

    Attributes: as `Batch`, and
        advantages: By how much an answer is better than the others of its group, float32 `(B,)`.
        shares: What the loss of a token of a row is multiplied by, float32 `(B,)`.
        old: Log-probabilities of the tokens under the model that wrote them, float32 `(B, L)`; `None`:
            it is the model that learns, as it is.
        reference: Those under the reference model; `None`: there is none.
    """

    advantages: np.ndarray = field(kw_only=True)
    shares: np.ndarray = field(kw_only=True)
    old: np.ndarray | None = field(default=None, kw_only=True)
    reference: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def terms(self) -> int:
        return len(self.inputs)


def group_batch(
    answers: list[Sample], advantages: np.ndarray, loss_type: GRPOLoss, max_completion_length: int
) -> GroupBatch:
    """The batch of some answers, with what the loss of a token counts by `loss_type`.

    `"grpo"` averages over the tokens of an answer and then over the answers, `"bnpo"` over all tokens
    of the batch, and `"dr_grpo"` divides by the largest length, so that short answers do not count more.
    """
    rows = padded_batch(answers)
    counts = rows.weights.sum(axis=1)
    if loss_type == "grpo":
        shares = 1 / counts
    elif loss_type == "bnpo":
        shares = np.full_like(counts, len(answers) / counts.sum())
    else:
        shares = np.full_like(counts, 1 / max_completion_length)
    return GroupBatch(**vars(rows), advantages=advantages.astype(np.float32), shares=shares)


def group_advantages(rewards: np.ndarray, *, scaled: bool = True) -> np.ndarray:
    r"""By how much each answer is better than those to the same prompt (arXiv 2402.03300, sec. 4.1.2).

    .. math::
        A_i = \frac{r_i - \bar r}{s + 10^{-4}}

    with the mean and the sample deviation :math:`s` of the group.

    Args:
        rewards: `(P, G)`, a group in each row, with G at least 2.
        scaled: Whether to divide by the deviation.

    Returns:
        float64 `(P, G)`.
    """
    rewards = rewards.astype(np.float64)
    differences: np.ndarray = rewards - rewards.mean(axis=1, keepdims=True)
    if not scaled:
        return differences
    return differences / (sample_deviations(rewards)[:, None] + _SMALLEST_DEVIATION)


def sample_deviations(rewards: np.ndarray) -> np.ndarray:
    """The deviation of the rewards of each group, `(P, G)` to `(P,)`."""
    return rewards.std(axis=1, ddof=1)


def answer_token_log_probabilities(
    model: Decoder, batch: Batch, temperature: float = 1.0
) -> mx.array:
    """The log-probability of each token of the answers, 0 at other positions, float32 `(B, L)`."""
    return -token_losses(model, batch, temperature=temperature)


def grpo(
    log_probabilities: mx.array,
    old: mx.array,
    reference: mx.array | None,
    advantages: mx.array,
    *,
    beta: float,
    epsilon: float,
    epsilon_high: float | None,
) -> mx.array:
    r"""The loss of each token (Shao et al., arXiv 2402.03300, eq. 3 and 4).

    .. math::
        -\min\!\big(\rho A,\ \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon_\mathrm{high})\,A\big)
        + \beta\,\Big(\frac{\pi_\mathrm{ref}}{\pi} - \log\frac{\pi_\mathrm{ref}}{\pi} - 1\Big), \quad
        \rho = \frac{\pi}{\pi_\mathrm{old}}

    Args:
        log_probabilities: Log-probabilities of the tokens under the model, float32 `(B, L)`.
        old: Under the model that wrote them, `(B, L)`.
        reference: Under the reference model; `None`: the second term is left out.
        advantages: Of the answers, `(B, 1)`.
        beta: The weight of the divergence from the reference.
        epsilon: How far the ratio counts below 1.
        epsilon_high: How far it counts above 1; `None`: as far as below.

    Returns:
        float32 `(B, L)`.
    """
    ratios = mx.exp(log_probabilities - old)
    clipped = mx.clip(ratios, 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    losses = -mx.minimum(ratios * advantages, clipped * advantages)
    if reference is None:
        return losses
    difference = reference - log_probabilities
    return losses + beta * (mx.exp(difference) - difference - 1)


def grpo_loss(
    *,
    beta: float,
    epsilon: float,
    epsilon_high: float | None,
    temperature: float,
) -> Loss:
    """The loss of a batch of groups, summed over its answers; see `grpo` and `group_batch`."""

    def loss(model: Decoder, batch: Batch) -> mx.array:
        if not isinstance(batch, GroupBatch):
            raise TypeError(f"[grpo] 'batch' must hold groups but is a {type(batch).__name__}.")
        log_probabilities = answer_token_log_probabilities(model, batch, temperature)
        old, reference = (
            None if array is None else mx.array(array) for array in (batch.old, batch.reference)
        )
        losses = grpo(
            log_probabilities,
            mx.stop_gradient(log_probabilities) if old is None else old,
            reference,
            mx.array(batch.advantages)[:, None],
            beta=beta,
            epsilon=epsilon,
            epsilon_high=epsilon_high,
        )
        return long_sum(losses * mx.array(batch.weights) * mx.array(batch.shares)[:, None])

    return loss


def with_log_probabilities(
    batch: GroupBatch, old: Decoder | None, reference: Decoder | None, temperature: float
) -> GroupBatch:
    """The same batch, with the log-probabilities of its tokens under other models."""
    found = [
        None if model is None else answer_token_log_probabilities(model, batch, temperature)
        for model in (old, reference)
    ]
    mx.eval([array for array in found if array is not None])
    arrays = [None if array is None else np.array(array) for array in found]
    return replace(batch, old=arrays[0], reference=arrays[1])
