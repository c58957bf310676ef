"""The losses of training: of the next tokens, against a teacher, and of groups of answers.

The first is a cross-entropy, the second the divergence from a teacher, and the last that of group
relative policy optimisation (DeepSeekMath, Shao et al., arXiv 2402.03300).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from ..errors import TrainingError
from ..models import Decoder, TokenModel
from ..ops import cross_entropy, log_softmax, long_sum
from ..ops.backend.compilation import random_key, set_random_key
from .batches import Batch, padded_batch
from .samples import Sample


def losses_in_blocks(
    modules: Sequence[nn.Module],
    loss: Callable[..., mx.array],
    hidden: mx.array,
    given: Sequence[mx.array],
    rows: int,
) -> mx.array:
    """The losses of all tokens. Their gradients compute each block again, one after the other.

    Args:
        modules: The modules whose trainable parameters the loss uses.
        loss: Maps the rows of some tokens, of `hidden` and of each of `given`, to losses `(R,)`.
        hidden: The hidden values `(T, D)`.
        given: What else the loss is computed from, `(T, ...)`. It gets no gradient.
        rows: The number of tokens in a block.

    Returns:
        float32 `(T,)`.
    """
    key = random_key()
    own = [module.trainable_parameters() for module in modules]
    blocks = [slice(start, start + rows) for start in range(0, hidden.shape[0], rows)]

    def of_block(
        parameters: Any, hidden: mx.array, given: list[mx.array], block: slice
    ) -> mx.array:
        # dropout must drop the same numbers in both passes
        set_random_key(key + mx.array([0, block.start], mx.uint32))
        _update(modules, parameters)
        return loss(hidden, *(array[block] for array in given))

    def forward(parameters: Any, hidden: mx.array, given: list[mx.array]) -> mx.array:
        parts: list[mx.array] = []
        for block in blocks:
            values = _after([hidden[block]], parts[-1:])[0]
            parts.append(of_block(parameters, values, given, block))
        return mx.concatenate(parts)

    def backward(primals: Any, cotangent: mx.array, outputs: Any) -> Any:
        parameters, hidden, given = primals
        flat = [array for _, array in cast(Any, tree_flatten(parameters))]
        # 16 bits would lose what later blocks add
        sums = [mx.zeros(array.shape) for array in flat]
        of_hidden: list[mx.array] = []
        for block in blocks:
            # a block waits for the gradients of the one before
            inputs = _after([*flat, hidden[block]], [cotangent, *sums, *of_hidden[-1:]])

            def of_inputs(*arrays: mx.array, block: slice = block) -> mx.array:
                known = _like(parameters, arrays[:-1])
                return of_block(known, arrays[-1], given, block)

            *added, last = mx.vjp(of_inputs, inputs, [cotangent[block]])[1]
            sums = [total + part for total, part in zip(sums, added, strict=True)]
            of_hidden.append(last)
        _update(modules, parameters)
        sums = [total.astype(array.dtype) for total, array in zip(sums, flat, strict=True)]
        none = [mx.zeros_like(array) for array in given]
        return _like(parameters, sums), mx.concatenate(of_hidden), none

    # parameters are given to the function, so that they get gradients
    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    losses: mx.array = function(own, hidden, list(given))
    _update(modules, own)
    return losses


def _update(modules: Sequence[nn.Module], parameters: Sequence[Any]) -> None:
    for module, own in zip(modules, parameters, strict=True):
        module.update(own)


def _after(arrays: list[mx.array], others: list[mx.array]) -> list[mx.array]:
    """The arrays, which are computed after the others."""
    after: Any = mx.depends(arrays, others) if others else arrays
    return list(after)


def _like(tree: Any, arrays: Sequence[mx.array]) -> Any:
    """The arrays in the structure of a tree."""
    following = iter(arrays)
    return tree_map(lambda _: next(following), tree)


Loss = Callable[[Any, Any], mx.array]
"""Maps a model and a batch to the sum of the losses of what it learns, float32 `()`.

It is called once for each form of a batch, and its graph is repeated, so that it must depend on nothing
else that changes.
"""

_WHOLE = 2**25
"""The most logits that are kept for the backward pass, 128 MB of float32."""

_BLOCK = 2**23
"""The number of logits in a block otherwise. On a CPU, MLX allocates what the next operations need
before they run, so that several blocks are held.
"""


def batch_logits(model: Decoder, batch: Batch) -> mx.array:
    """The logits of a batch, `(B, L, V)`. Packed samples do not see each other."""
    return model.logits(batch_hidden(model, batch))


def next_token_loss(model: Decoder, batch: Batch, *, label_smoothing: float = 0.0) -> mx.array:
    r"""The sum of the cross-entropies of the learned tokens, in nats.

    .. math::
        -\sum_{b, t} w_{bt} \log p(y_{bt} \mid x_{b, \le t})

    for the batch's inputs :math:`x`, targets :math:`y` and weights :math:`w`; `label_smoothing` as of
    `smoothed_cross_entropy`. The logits of many tokens over a large vocabulary are computed in blocks,
    and again in the backward pass, so that the memory for them does not grow with the batch.
    """
    return long_sum(token_losses(model, batch, label_smoothing))


def token_losses(
    model: Decoder, batch: Batch, label_smoothing: float = 0.0, temperature: float = 1.0
) -> mx.array:
    """The cross-entropy of each learned token, 0 at the other places, in nats, float32 `(B, L)`."""
    hidden = batch_hidden(model, batch)
    return target_losses(model, hidden, batch, label_smoothing, temperature)


def target_losses(
    model: TokenModel,
    hidden: mx.array,
    batch: Batch,
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
) -> mx.array:
    """The cross-entropy of each target of a batch times its weight, in nats, float32 `(B, L)`.

    Args:
        model: The model whose head gives the logits.
        hidden: What the head reads for each target, `(B, L, D)`.
        batch: Has the targets and their weights.
        label_smoothing: As of `smoothed_cross_entropy`.
        temperature: What the logits are divided by.
    """

    def loss(hidden: mx.array, targets: mx.array) -> mx.array:
        logits = model.logits(hidden)
        if temperature != 1:
            logits = logits.astype(mx.float32) / temperature
        return smoothed_cross_entropy(logits, targets, label_smoothing)

    losses = losses_of_hidden(model, loss, hidden, [mx.array(batch.targets)])
    return losses * mx.array(batch.weights)


def smoothed_cross_entropy(
    logits: mx.array, targets: mx.array, label_smoothing: float = 0.0
) -> mx.array:
    r"""The cross-entropy with a distribution that is not quite sure of the target, in nats.

    .. math::
        -\sum_k q_k \log p_k, \quad q_k = (1 - \epsilon)\,[k = y] + \epsilon / K

    for :math:`K` classes, as in `torch.nn.CrossEntropyLoss(label_smoothing=...)` and in Szegedy et al.,
    arXiv 1512.00567, whom Vaswani et al., arXiv 1706.03762, follow.

    Args:
        logits: Floats `(..., K)`.
        targets: Integers `(...)`.
        label_smoothing: The share :math:`\epsilon`.

    Returns:
        float32 `(...)`.
    """
    losses = cross_entropy(logits, targets)
    if not label_smoothing:
        return losses
    logits = logits.astype(mx.float32)
    of_target = mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    return losses + label_smoothing * (of_target - long_sum(logits, axis=-1) / logits.shape[-1])


def batch_hidden(model: Decoder, batch: Batch) -> mx.array:
    """The input of a model's head for a batch, `(B, L, D)`. Packed samples do not see each other."""
    arrays = {"valid": batch.valid, "starts": batch.starts}
    masks: dict[str, Any] = {
        name: mx.array(array) for name, array in arrays.items() if array is not None
    }
    return model.text_hidden(mx.array(batch.inputs), **masks)


def kept_logits(model: TokenModel, targets: int) -> int:
    """The number of logits of so many targets that are in memory at a time."""
    count = targets * model.num_logits
    return count if count <= _WHOLE else min(count, max(_BLOCK, model.num_logits))


def losses_of_hidden(
    model: TokenModel,
    loss: Callable[..., mx.array],
    hidden: mx.array,
    given: Sequence[mx.array],
) -> mx.array:
    """The losses of tokens that each depend on the token's own logits.

    Those of many tokens over a large vocabulary are computed in blocks, and again in the backward pass.

    Args:
        model: The model whose head the loss uses.
        loss: Maps rows of `hidden` and of each of `given`, `(..., D)` and so on, to losses `(...)`.
        hidden: The hidden values of the model, `(B, L, D)`.
        given: What else the loss is computed from, `(B, L, ...)`. It gets no gradient.

    Returns:
        float32 `(B, L)`.
    """
    shape = hidden.shape[:2]
    if math.prod(shape) * model.vocab_size <= _WHOLE:
        return loss(hidden, *given)
    rows = [array.reshape(-1, *array.shape[2:]) for array in given]
    losses = losses_in_blocks(
        model.head_modules,
        loss,
        hidden.reshape(-1, hidden.shape[-1]),
        rows,
        max(_BLOCK // model.vocab_size, 1),
    )
    return losses.reshape(shape)


def distillation_loss(
    teacher: Decoder,
    student: Decoder,
    *,
    weight: float = 1.0,
    temperature: float = 1.0,
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
    """A batch with what a teacher expects at each place.

    Attributes:
        likeliest: The tokens that the teacher finds likeliest, int32 `(B, L, K)`.
        logits: Their logits, up to a term that they share, float `(B, L, K)`.
    """

    likeliest: np.ndarray = field(kw_only=True)
    logits: np.ndarray = field(kw_only=True)


def known_loss(*, weight: float = 1.0, temperature: float = 1.0) -> Loss:
    """As `distillation_loss` with `top_k`, of each `KnownBatch` instead of a teacher."""

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
    """As `divergence`, with the teacher's logits of the chosen tokens alone."""
    scale = 1.0 / temperature
    q = log_softmax(logits.astype(mx.float32) * scale)
    if chosen is not None:
        q = mx.take_along_axis(q, chosen, axis=-1)
    p = log_softmax(wanted * scale)
    return temperature**2 * long_sum(mx.exp(p) * (p - q), axis=-1)


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
    """The log-probability of each token of the answers, 0 at other places, float32 `(B, L)`."""
    return -token_losses(model, batch, temperature=temperature)


def grpo(
    log_probabilities: mx.array,
    old: mx.array,
    reference: mx.array | None,
    advantages: mx.array,
    *,
    beta: float = 0.1,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> mx.array:
    r"""The loss of each token (Shao et al., arXiv 2402.03300, eq. 3 and 4).

    .. math::
        -\min\!\big(\rho A,\ \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon_\mathrm{high})\,A\big)
        + \beta\,\Big(\frac{\pi_\mathrm{ref}}{\pi} - \log\frac{\pi_\mathrm{ref}}{\pi} - 1\Big), \quad
        \rho = \frac{\pi}{\pi_\mathrm{old}}

    Args:
        log_probabilities: Those of the tokens under the model, float32 `(B, L)`.
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
    beta: float = 0.1,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    temperature: float = 1.0,
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
