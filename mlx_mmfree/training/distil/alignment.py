"""Losses that bring the inside of a student close to that of its teacher, before its logits count."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from ...models import Decoder
from ...ops import long_sum
from ..batches import Batch
from ..loop import Validation
from ..loss import Loss, batch_hidden


def mixer_loss(teacher: Decoder, layers: Sequence[int]) -> Loss:
    r"""How far each new mixer is from the attention whose place it takes, on the same input.

    .. math::
        \frac{1}{|S|} \sum_{l \in S} \frac{\sum \lVert M_l(x_l) - A_l(x_l) \rVert^2}
        {\sum \lVert A_l(x_l) - \bar A_l \rVert^2}

    :math:`x_l` are the normed inputs of layer l in the teacher, so that no layer waits for another, as
    in the first stage of MOHAWK (Bick et al., arXiv 2408.10189). The mean :math:`\bar A_l` is that of
    all tokens of the batch. A mixer that gives this mean has a loss of 1. The result is summed over
    tokens, as losses are.

    Args:
        teacher: The teacher, which is frozen here.
        layers: The layers S.
    """
    _freeze(teacher)

    def loss(student: Decoder, batch: Batch) -> mx.array:
        with _recorded(teacher) as inputs:
            batch_hidden(teacher, batch)
        errors = []
        for layer in layers:
            block = teacher.blocks[layer]
            x = block.token_norm(inputs[layer])
            wanted = mx.stop_gradient(block.token_mixer(x)[0])
            got = student.blocks[layer].token_mixer(mx.stop_gradient(x))[0]
            errors.append(_relative_error(got, wanted, batch))
        return _summed(errors, batch)

    return loss


def hidden_loss(teacher: Decoder) -> Loss:
    r"""How far the residual stream of the student is from that of the teacher, behind each block.

    .. math::
        \frac{1}{N} \sum_{l=1}^{N} \frac{\sum \lVert s_l - t_l \rVert^2}
        {\sum \lVert t_l - \bar t_l \rVert^2}

    Each block of the student reads what its blocks before gave, so that all prefixes of the student are
    matched at once. The result is summed over tokens, as losses are.

    Args:
        teacher: The teacher, which is frozen here.
    """
    _freeze(teacher)

    def loss(student: Decoder, batch: Batch) -> mx.array:
        streams = []
        for model in (teacher, student):
            with _recorded(model) as inputs:
                batch_hidden(model, batch)
            # the first input is the embedding
            streams.append(inputs[1:])
        errors = [
            _relative_error(got, mx.stop_gradient(wanted), batch)
            for wanted, got in zip(*streams, strict=True)
        ]
        return _summed(errors, batch)

    return loss


def validation_by(loss: Loss, rows: np.ndarray, batch_size: int) -> Validation:
    """A validation by the loss that a stage minimises, on rows of tokens, a batch at a time."""
    starts = range(0, len(rows), batch_size)
    batches = [Batch.of_rows(rows[n : n + batch_size]) for n in starts]

    def validate(student: Any) -> dict[str, float]:
        total = sum(float(loss(student, batch)) for batch in batches)
        return {"valid_loss": total / sum(batch.tokens for batch in batches)}

    return validate


def _freeze(teacher: Decoder) -> None:
    teacher.freeze()
    teacher.eval()


@contextmanager
def _recorded(model: Decoder) -> Iterator[list[mx.array]]:
    """Collects the inputs of all blocks, and at the end the output of the last."""
    streams: list[mx.array] = []
    run_block = model.run_block

    def run(block: Any, x: mx.array, *arguments: Any, **options: Any) -> Any:
        if not streams:
            streams.append(x)
        if run_block is None:
            y, state = block(x, *arguments, **options)
        else:
            y, state = run_block(block, x, *arguments, **options)
        streams.append(y)
        return y, state

    model.run_block = run
    try:
        yield streams
    finally:
        model.run_block = run_block


def _relative_error(got: mx.array, wanted: mx.array, batch: Batch) -> mx.array:
    """The squared error of the learned tokens over their spread, float32 `()`."""
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    weights = mx.array(batch.weights)[..., None]
    count = mx.maximum(long_sum(weights), 1)
    mean = long_sum((weights * wanted).reshape(-1, wanted.shape[-1]), axis=-2) / count
    spread = long_sum(weights * mx.square(wanted - mean))
    return long_sum(weights * mx.square(got - wanted)) / mx.maximum(spread, 1e-12)


def _summed(errors: list[mx.array], batch: Batch) -> mx.array:
    """Their mean for each learned token."""
    return mx.stack(errors).mean() * long_sum(mx.array(batch.weights))
