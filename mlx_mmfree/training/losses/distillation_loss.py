"""The divergence from a teacher's distribution, and the loss of known logits."""

import math
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...models import Decoder
from ...ops import cross_entropy, log_softmax, long_sum
from ..batches import Batch
from .loss import Loss, batch_hidden, losses_of_hidden


def distillation_loss(
    teacher: Decoder,
    student: Decoder,
    *,
    weight: float,
    temperature: float,
    top_k: int | None = None,
) -> Loss:
    r"""A loss that adds the divergence from a teacher to the cross-entropy on the data.

    .. math::
        \mathrm{CE}(\text{target}, q) + w\,T^2\,\mathrm{KL}(p_T \,\|\, q_T)

    It is summed over the learned tokens, in blocks like `next_token_loss`. :math:`q` is the student's
    distribution, and :math:`p_T, q_T` are teacher's and student's at temperature :math:`T`; see
    `divergence`.

    Args:
        teacher: The teacher, which is frozen here.
        student: The model that will be trained.
        weight: The factor :math:`w`.
        temperature: The divisor :math:`T` of both models' logits.
        top_k: Compare only the `top_k` tokens that the teacher finds likeliest; `None` compares all.

    Raises:
        TrainingError: The models have different vocabularies, or an argument is out of range.
    """
    if teacher.vocab_size != student.vocab_size:
        raise TrainingError(
            f"[distillation] 'teacher' must have the student's {student.vocab_size} tokens but has "
            f"{teacher.vocab_size}. Choose a teacher with the same vocabulary."
        )
    for name, value in (("weight", weight), ("temperature", temperature)):
        if not 0 < value < math.inf:
            raise TrainingError(
                f"[distillation] '{name}' must be positive and finite but got {value}."
            )
    check_top_k(top_k, teacher.vocab_size)
    teacher.freeze()
    teacher.eval()

    def loss(model: Decoder, batch: Batch) -> mx.array:
        def of_hidden(hidden: mx.array, targets: mx.array, of_teacher: mx.array) -> mx.array:
            logits, wanted = model.logits(hidden), teacher.logits(of_teacher)
            apart = divergence(logits, wanted, temperature=temperature, top_k=top_k)
            return cross_entropy(logits, targets) + weight * apart

        known = mx.stop_gradient(batch_hidden(teacher, batch))
        given = [mx.array(batch.targets), known]
        losses = losses_of_hidden(model, of_hidden, batch_hidden(model, batch), given)
        return long_sum(losses * mx.array(batch.weights))

    return loss


def check_top_k(top_k: int | None, vocab_size: int) -> None:
    """Refuses a number of tokens that a distribution cannot be compared on, with `TrainingError`."""
    if top_k is not None and not 1 < top_k <= vocab_size:
        raise TrainingError(
            f"[distillation] 'top_k' must be from 2 to the size of the vocabulary, {vocab_size}, "
            f"but got {top_k}."
        )


@dataclass(frozen=True)
class KnownBatch(Batch):
    """A batch with what a teacher expects at each position.

    Attributes:
        likeliest: The tokens that the teacher finds likeliest, int32 `(B, L, K)`.
        logits: Their logits, up to a term that they share, float `(B, L, K)`.
    """

    likeliest: np.ndarray = field(kw_only=True)
    logits: np.ndarray = field(kw_only=True)


def known_loss(*, weight: float, temperature: float) -> Loss:
    """Like `distillation_loss` with `top_k`, of each `KnownBatch` instead of a teacher."""

    def loss(model: Decoder, batch: KnownBatch) -> mx.array:
        def of_hidden(
            hidden: mx.array, targets: mx.array, chosen: mx.array, wanted: mx.array
        ) -> mx.array:
            logits = model.logits(hidden)
            apart = _divergence(logits, wanted, chosen, temperature)
            return cross_entropy(logits, targets) + weight * apart

        known = [mx.array(batch.likeliest), mx.array(batch.logits).astype(mx.float32)]
        given = [mx.array(batch.targets), *known]
        losses = losses_of_hidden(model, of_hidden, batch_hidden(model, batch), given)
        return long_sum(losses * mx.array(batch.weights))

    return loss


def divergence(
    logits: mx.array, wanted: mx.array, *, temperature: float = 1.0, top_k: int | None = None
) -> mx.array:
    r"""The divergence of a student's distribution from the teacher's, times the squared temperature.

    .. math::
        T^2 \sum_{v \in S} p_v (\log p_v - \log q_v), \quad
        p = \mathrm{softmax}_S(z'/T), \quad q = \mathrm{softmax}(z/T)

    :math:`S` holds all tokens, or the `top_k` with the largest :math:`z'`. The teacher's probabilities
    are normalised over :math:`S`. The student's are not, so that it loses by likely tokens outside of
    :math:`S`. The factor :math:`T^2` keeps the size of the gradient. All is computed in float32.

    Args:
        logits: The student's logits :math:`z`, `(..., V)`.
        wanted: The teacher's logits :math:`z'`, `(..., V)`. They get no gradient.
        temperature: The divisor :math:`T`.
        top_k: The number of tokens in :math:`S`; `None` takes all.

    Returns:
        The divergence in nats, float32 `(...)`.
    """
    wanted = mx.stop_gradient(wanted).astype(mx.float32)
    chosen = None
    if top_k is not None:
        chosen = mx.argpartition(-wanted, kth=top_k - 1, axis=-1)[..., :top_k]
        wanted = mx.take_along_axis(wanted, chosen, axis=-1)
    return _divergence(logits, wanted, chosen, temperature)


def _divergence(
    logits: mx.array, wanted: mx.array, chosen: mx.array | None, temperature: float
) -> mx.array:
    """Like `divergence`, with the teacher's logits of the chosen tokens alone."""
    scale = 1.0 / temperature
    q = log_softmax(logits.astype(mx.float32) * scale)
    if chosen is not None:
        q = mx.take_along_axis(q, chosen, axis=-1)
    p = log_softmax(wanted * scale)
    return temperature**2 * long_sum(mx.exp(p) * (p - q), axis=-1)
