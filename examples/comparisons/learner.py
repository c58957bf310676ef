"""Trains a model on a task, and measures it."""

import time
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.models import Decoder
from mlx_mmfree.training import Settings
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.losses.loss import batch_logits, next_token_loss
from mlx_mmfree.training.optimizer import build_optimizer, build_schedule
from mlx_mmfree.training.optimizer_step import OptimizerStep

from .models import DIMS
from .tasks import Task, held_out_text

LOSSES = 20
"""How many mean losses of a run are kept."""


def learn(model: Decoder, task: Task, rate: float, seed: int) -> dict[str, Any]:
    """Trains a model in place. Returns its losses, `[step, nats]`, and tokens per second.

    Speed comes from the fastest tenth of the steps, which other programs disturb least.

    Raises:
        TrainingError: The loss is not finite.
    """
    settings = Settings(
        output=".",
        model={"model_type": "metaformer"},
        stages=(Stage(1.0, {}),),
        steps=task.steps,
        learning_rate=rate,
        warmup_steps=task.steps // 20,
        weight_decay=0.01,
        seed=seed,
    )
    optimizer = build_optimizer(settings)
    optimizer.init(model.trainable_parameters())
    step = OptimizerStep(
        model,
        settings.loop({}),
        optimizer,
        build_schedule(settings, DIMS),
        lambda number: [task.batch(seed + 1, number)],
        next_token_loss,
        DataParallel(),
    )
    model.train()
    seconds, losses, sums = [], [], []
    for number in range(task.steps):
        start = time.perf_counter()
        result = step(number)
        seconds.append(time.perf_counter() - start)
        sums.append(result.loss / result.terms)
        if (number + 1) * LOSSES // task.steps > number * LOSSES // task.steps:
            losses.append([number + 1, float(np.mean(sums))])
            sums.clear()
    speed = task.batch_size * task.length / float(np.quantile(seconds, 0.1))
    return {"losses": losses, "tokens_per_second": speed}


def accuracy(model: Decoder, task: Task, batches: int) -> float:
    """The share of the answers in held-out batches that the model gives."""
    model.eval()
    right, asked = 0.0, 0.0
    for batch in task.held_out(batches):
        given = np.array(mx.argmax(batch_logits(model, batch), axis=-1))
        right += float(((given == batch.targets) * batch.weights).sum())
        asked += batch.tokens
    return right / asked


def bits_per_character(
    model: Decoder,
    length: int,
    stories: int,
    *,
    carries_state: bool = False,
    most: int | None = None,
) -> float:
    """Of held-out stories, read in chunks of `length` bytes, which may go on from each other.

    Args:
        model: The model.
        length: Bytes of a chunk.
        stories: Number of stories.
        carries_state: Whether a chunk goes on from the one before.
        most: The most bytes that are read.
    """
    model.eval()
    text, characters = held_out_text(stories)
    read = text[:most]
    measured = measure_perplexity(
        model, read, len(read), length=length, carries_state=carries_state
    )
    return measured.bits_per_byte * len(text) / characters
