"""Which of the tokens that a draft model proposed are kept, and which token follows them."""

import mlx.core as mx

from ..ops import log_softmax


def accept_chosen(chosen: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
    """How many tokens are the choices themselves `(1,)`, and the choice behind them `(1,)`."""
    chosen = chosen.astype(mx.int32)
    if not drafts:
        return mx.zeros((1,), mx.int32), chosen
    is_same = (mx.concatenate(drafts) == chosen[:-1]).astype(mx.int32)
    kept = mx.cumprod(is_same).sum(keepdims=True)
    return kept, chosen[kept]


def accept_drawn(
    scores: mx.array, draft_scores: list[mx.array], drafts: list[mx.array]
) -> tuple[mx.array, mx.array]:
    """How many tokens are kept `(1,)`, and a token drawn from what they leave over `(1,)`."""
    p = mx.exp(log_softmax(scores))
    # nothing was proposed behind the last token
    q = mx.concatenate([*(mx.exp(log_softmax(row)) for row in draft_scores), mx.zeros_like(p[:1])])
    kept = mx.zeros((1,), mx.int32)
    if drafts:
        at = mx.concatenate(drafts)[:, None]
        p_at, q_at = (mx.take_along_axis(x[:-1], at, axis=-1)[:, 0] for x in (p, q))
        is_kept = mx.random.uniform(shape=p_at.shape) * q_at < p_at
        kept = mx.cumprod(is_kept.astype(mx.int32)).sum(keepdims=True)
    left = mx.maximum(p[kept] - q[kept], 0.0)
    # rounding may leave nothing where both are equal
    left = mx.where(left.sum(axis=-1, keepdims=True) > 0, left, p[kept])
    return kept, mx.random.categorical(mx.log(left)).astype(mx.int32)
