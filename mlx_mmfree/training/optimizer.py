"""The optimizer and learning-rate schedule of a training run."""

from collections.abc import Callable

import mlx.core as mx
import mlx.optimizers as optim

from .settings import Settings


def build_optimizer(settings: Settings) -> optim.MultiOptimizer:
    """AdamW, with weight decay on the matrices only."""

    def adamw(weight_decay: float) -> optim.AdamW:
        return optim.AdamW(
            learning_rate=settings.learning_rate,
            betas=list(settings.betas),
            weight_decay=weight_decay,
            bias_correction=True,
        )

    def is_matrix(path: str, weight: mx.array) -> bool:
        return path.endswith("weight") and weight.ndim == 2

    return optim.MultiOptimizer([adamw(settings.weight_decay), adamw(0.0)], [is_matrix])


def build_schedule(settings: Settings) -> Callable[[int], mx.array]:
    """The learning rate of a step: linear warm-up to the peak, then cosine decay."""
    peak, end = settings.learning_rate, settings.learning_rate * settings.final_learning_rate
    cosine = optim.cosine_decay(peak, settings.steps - settings.warmup_steps, end)
    if settings.warmup_steps:
        warmup = optim.linear_schedule(peak / settings.warmup_steps, peak, settings.warmup_steps)
        schedule = optim.join_schedules([warmup, cosine], [settings.warmup_steps])
    else:
        schedule = cosine
    return lambda step: schedule(mx.array(step))
