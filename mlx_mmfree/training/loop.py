"""The training loop."""

import json
import math
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from tqdm import tqdm

from ..errors import TrainingError
from ..models import Decoder
from ..platform.threads import thread_count
from ..version import __version__
from .checkpoint import load_checkpoint, save_checkpoint
from .log import RunLog, plot_curve
from .optimizer import build_optimizer, build_schedule
from .settings import Settings

Batches = Callable[[int], list[np.ndarray]]
"""Maps a step to its token batches `(B, L + 1)`, one for each accumulated forward pass."""

Validation = Callable[[Decoder], dict[str, float]]
"""Maps the model to named figures; `valid_loss` picks the best weights."""


def next_token_loss(model: Decoder, tokens: mx.array) -> mx.array:
    """Sum of the cross-entropies of tokens 1 to L given the ones before, in nats."""
    logits, _ = model(tokens[:, :-1])
    return nn.losses.cross_entropy(logits.astype(mx.float32), tokens[:, 1:], reduction="sum")


class Trainer:
    """Trains a model step by step, and can be killed and resumed at any step.

    Args:
        model: The model, its trainable parameters are changed in place.
        settings: The run.
        batches: The data.
        validation: Measures the model; called every `steps_per_eval` steps and at the end.
    """

    def __init__(
        self, model: Decoder, settings: Settings, batches: Batches, validation: Validation
    ):
        self.model = model
        self._settings = settings
        self._batches = batches
        self._validation = validation
        self._run = settings.path(settings.output)
        self._schedule = build_schedule(settings)
        self._optimizer = build_optimizer(settings)
        self._optimizer.init(model.trainable_parameters())
        self._loss_and_gradient = nn.value_and_grad(model, next_token_loss)
        self._progress: dict[str, Any] = {
            "step": 0,
            "tokens": 0,
            "best_loss": math.inf,
            "best_step": 0,
            "settings": settings.record(),
        }

    def train(self) -> dict[str, Any]:
        """Runs to the last step; returns the progress record.

        Raises:
            TrainingError: The loss is not finite, or the run's checkpoint has other settings.
        """
        self._resume()
        settings, progress = self._settings, self._progress
        log = RunLog(self._run / "log.jsonl", progress["step"])
        if progress["step"] == 0:
            log.write(step=0, **_environment(), settings=settings.record())
        bar = tqdm(total=settings.steps, initial=progress["step"], unit="step", dynamic_ncols=True)
        reported, losses = time.perf_counter(), []
        while progress["step"] < settings.steps:
            loss, tokens, norm, rate = self._step(progress["step"])
            losses.append(loss)
            progress["step"] += 1
            progress["tokens"] += tokens
            bar.update()
            step = progress["step"]
            if step % settings.steps_per_report == 0 or step == settings.steps:
                seconds = (time.perf_counter() - reported) / len(losses)
                record = {
                    "loss": sum(losses) / len(losses),
                    "learning_rate": rate,
                    "gradient_norm": norm,
                    "tokens_per_second": tokens / seconds,
                    "peak_memory_bytes": mx.get_peak_memory(),
                }
                log.write(step=step, tokens=progress["tokens"], **record)
                bar.set_postfix_str(
                    f"loss {record['loss']:.3f}, {record['tokens_per_second']:.0f} tokens/s"
                )
                losses = []
            if step % settings.steps_per_eval == 0 or step == settings.steps:
                self._validate(log)
            if step % settings.save_every == 0 or step == settings.steps:
                save_checkpoint(self._run, self.model, self._optimizer, progress)
            if not losses:
                reported = time.perf_counter()
        bar.close()
        if not plot_curve(self._run / "log.jsonl", self._run / "curve.png"):
            print("No curve was drawn: pip install 'mlx-mmfree[plot]' adds matplotlib.")
        return progress

    def _resume(self) -> None:
        progress = load_checkpoint(self._run, self.model, self._optimizer)
        if progress is None:
            return
        old, new = progress["settings"], _plain(self._settings.record())
        if differing := sorted(key for key in new if old.get(key) != new[key]):
            raise TrainingError(
                f"[train] '{self._run}' holds a run with other values of {', '.join(differing)}. "
                "Resume with the same settings or give another output folder."
            )
        self._progress = progress

    def _step(self, step: int) -> tuple[float, int, float, float]:
        """One optimizer step: mean loss, tokens, gradient norm and learning rate."""
        total, tokens, gradient = mx.zeros(()), 0, None
        for batch in self._batches(step):
            loss, part = self._loss_and_gradient(self.model, mx.array(batch))
            total = total + loss
            tokens += batch.shape[0] * (batch.shape[1] - 1)
            gradient = part if gradient is None else tree_map(mx.add, gradient, part)
            mx.eval(total, gradient)
        gradient = tree_map(lambda g: g / tokens, gradient)
        gradient, norm = optim.clip_grad_norm(gradient, self._settings.clip_norm or math.inf)
        mean, length = float(total) / tokens, float(norm)
        if not math.isfinite(mean) or not math.isfinite(length):
            raise TrainingError(
                f"[train] the loss is {mean} and the gradient norm {length} at step {step}; "
                f"the last good state is kept in '{self._run}'. Lower 'learning_rate' or "
                "'clip_norm'."
            )
        rate = self._schedule(step)
        self._optimizer.learning_rate = rate
        self._optimizer.update(self.model, gradient)
        mx.eval(self.model.parameters(), self._optimizer.state)
        return mean, tokens, length, float(rate)

    def _validate(self, log: RunLog) -> None:
        progress = self._progress
        figures = self._validation(self.model)
        log.write(step=progress["step"], tokens=progress["tokens"], **figures)
        if figures["valid_loss"] < progress["best_loss"]:
            progress["best_loss"], progress["best_step"] = figures["valid_loss"], progress["step"]
            self.model.save_weights(str(self._run / "best.new.safetensors"))
            (self._run / "best.new.safetensors").replace(self._run / "best.safetensors")


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(record))
    return plain


def _environment() -> dict[str, Any]:
    """What a run's figures depend on beside its settings."""
    return {
        "mlx_version": version("mlx"),
        "library_version": __version__,
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "threads": thread_count(),
    }
