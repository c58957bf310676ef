"""Losses that prefer one answer to another: DPO and ORPO."""

from typing import Literal, NamedTuple, TypeGuard, get_args

import mlx.core as mx

from ..errors import TrainingError
from ..models import Decoder
from ..ops import long_sum
from .batches import Batch
from .loss import Loss, token_losses
from .pairs import PairBatch

TrainMode = Literal["dpo", "orpo"]
LossType = Literal["sigmoid", "hinge", "ipo"]

_MOST = -1e-7
"""A mean log-probability above it counts as this one: the odds of a certain answer are infinite."""


def is_mode(name: str) -> TypeGuard[TrainMode]:
    """Whether it names a way to learn preferences."""
    return name in get_args(TrainMode)


class Preferences(NamedTuple):
    """How much a model prefers the chosen answers of P pairs, float32 `(P,)` each.

    Attributes:
        losses: The loss of each pair.
        margins: The reward of the chosen answer minus that of the rejected one.
    """

    losses: mx.array
    margins: mx.array


def preference_loss(mode: TrainMode, *, beta: float = 0.1, loss_type: LossType = "sigmoid") -> Loss:
    """The loss of a preference run, `dpo` or `orpo`, summed over the pairs of a batch."""

    def loss(model: Decoder, batch: Batch) -> mx.array:
        return preferences(model, batch, mode, beta=beta, loss_type=loss_type).losses.sum()

    return loss


def preferences(
    model: Decoder,
    batch: Batch,
    mode: TrainMode,
    *,
    beta: float = 0.1,
    loss_type: LossType = "sigmoid",
) -> Preferences:
    """Losses and margins of a batch of pairs under a model; see `dpo` and `orpo`."""
    if not isinstance(batch, PairBatch):
        raise TypeError(f"[{mode}] 'batch' must hold pairs but is a {type(batch).__name__}.")
    sums = answer_log_probabilities(model, batch)
    counts = mx.array(batch.weights).sum(axis=1)
    if mode == "orpo":
        return orpo(*_halves(sums / counts), beta=beta)
    if batch.reference is None:
        raise TrainingError(
            "[dpo] 'data' must have log-probabilities under a reference model but has none. Compute "
            "them with 'with_reference'."
        )
    ratios = sums - mx.array(batch.reference).T.reshape(-1)
    if loss_type == "ipo":
        ratios = ratios / counts
    return dpo(*_halves(ratios), beta=beta, loss_type=loss_type)


def answer_log_probabilities(model: Decoder, batch: Batch) -> mx.array:
    r"""The log-probability of the learned tokens of each row, in nats, float32 `(B,)`.

    .. math::
        \sum_t w_{bt} \log p(y_{bt} \mid x_{b, \le t})
    """
    return -long_sum(token_losses(model, batch), axis=-1)


def dpo(
    chosen: mx.array, rejected: mx.array, *, beta: float = 0.1, loss_type: LossType = "sigmoid"
) -> Preferences:
    r"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290, eq. 7).

    .. math::
        d = \log\frac{\pi(y_c \mid x)}{\pi_\mathrm{ref}(y_c \mid x)}
          - \log\frac{\pi(y_r \mid x)}{\pi_\mathrm{ref}(y_r \mid x)}, \quad
        L = -\log \sigma(\beta d)

    `"hinge"` is :math:`\max(0, 1 - \beta d)` (arXiv 2305.10425), and `"ipo"`
    :math:`(d - 1 / 2\beta)^2` (arXiv 2310.12036, eq. 17) with log-ratios that are means over tokens.

    Args:
        chosen: Log-ratios of the chosen answers, float32 `(P,)`.
        rejected: Those of the rejected ones.
        beta: How far the model may leave the reference; the smaller, the farther.
        loss_type: `"sigmoid"`, `"hinge"` or `"ipo"`.
    """
    difference = chosen - rejected
    margins = beta * difference
    if loss_type == "sigmoid":
        return Preferences(_negative_log_sigmoid(margins), margins)
    if loss_type == "hinge":
        return Preferences(mx.maximum(1 - margins, 0), margins)
    return Preferences(mx.square(difference - 1 / (2 * beta)), margins)


def orpo(chosen: mx.array, rejected: mx.array, *, beta: float = 0.1) -> Preferences:
    r"""Odds ratio preference optimisation (Hong et al., arXiv 2403.07691, eq. 6 and 7).

    .. math::
        L = -\ell_c - \beta \log \sigma\Big(\log\frac{\mathrm{odds}(y_c)}{\mathrm{odds}(y_r)}\Big), \quad
        \mathrm{odds}(y) = \frac{e^{\ell}}{1 - e^{\ell}}

    where :math:`\ell` is the mean log-probability of the tokens of an answer.

    Args:
        chosen: Mean log-probabilities of the chosen answers, float32 `(P,)`.
        rejected: Those of the rejected ones.
        beta: The weight of the odds ratio.
    """
    ratio = _log_odds(chosen) - _log_odds(rejected)
    return Preferences(beta * _negative_log_sigmoid(ratio) - chosen, beta * (chosen - rejected))


def _log_odds(mean: mx.array) -> mx.array:
    mean = mx.minimum(mean, _MOST)
    return mean - mx.log(-mx.expm1(mean))


def _negative_log_sigmoid(x: mx.array) -> mx.array:
    return mx.logaddexp(-x, mx.zeros((), x.dtype))


def _halves(rows: mx.array) -> tuple[mx.array, mx.array]:
    """The values of the chosen and of the rejected answers."""
    middle = rows.shape[0] // 2
    return rows[:middle], rows[middle:]
