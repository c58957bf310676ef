"""The losses of training: of the next tokens, against a teacher, and of groups of answers.

The first is a cross-entropy, the second the divergence from a teacher, and the last the loss of
group relative policy optimisation (DeepSeekMath, Shao et al., arXiv 2402.03300).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ...models import Decoder, TokenModel
from ...ops import cross_entropy, long_sum
from ...ops.device import random_key, set_random_key
from ..batches import Batch


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

It is called once for each format of a batch, and its graph is repeated, so that it must depend on
nothing else that changes.
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
    """The cross-entropy of each learned token, 0 at the other positions, in nats, float32 `(B, L)`."""
    hidden = batch_hidden(model, batch)
    return target_losses(model, hidden, batch, label_smoothing, temperature)


def target_losses(
    model: TokenModel,
    hidden: mx.array,
    batch: Batch,
    label_smoothing: float,
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


def logits_at_a_time(model: TokenModel, targets: int) -> int:
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

    Many tokens over a large vocabulary are computed in blocks, and again in the backward pass.

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
