"""How well a model does on the held-out samples of a fine-tuning run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..models import Decoder
from .batches import Batch, evaluation_batches
from .fine_tune_data import batch_maker
from .fine_tune_settings import FineTuneSettings
from .loss import next_token_loss
from .preference_loss import is_mode, preferences
from .samples import Samples
from .tasks.images import ImageBatch, ImageTask


def mean_loss(model: Decoder, batches: Sequence[Batch]) -> float:
    """The mean cross-entropy of the learned tokens of some batches, in nats."""
    total = sum(float(next_token_loss(model, batch)) for batch in batches)
    return total / sum(batch.tokens for batch in batches)


def held_out_loss(model: Decoder, samples: Samples[Any], settings: FineTuneSettings) -> float:
    """The mean loss of the learned tokens, or of the pairs, of held-out samples, in nats."""
    return held_out_figures(model, samples, settings)["loss"]


def held_out_figures(
    model: Decoder, samples: Samples[Any], settings: FineTuneSettings
) -> dict[str, float]:
    """How well a model does on held-out samples.

    Returns:
        `loss`, the mean of the learned tokens, of the pairs or of the images, in nats. For images also
        `accuracy`, the share of those that are sorted rightly. For preferences also `accuracy`, the
        share of pairs whose chosen answer has the larger reward, and `margin`, the mean difference of
        the rewards.
    """
    samples.check_some()
    model.eval()
    batches = evaluation_batches(
        samples.samples,
        settings.batch_size,
        settings.test_batches,
        make=batch_maker(samples, settings),
    )
    return _figures(model, batches, settings)


def _figures(
    model: Decoder, batches: Sequence[Batch], settings: FineTuneSettings
) -> dict[str, float]:
    mode = settings.train_mode
    if isinstance(batches[0], ImageBatch):
        return ImageTask.figures(model, batches)
    if not is_mode(mode):
        return {"loss": mean_loss(model, batches)}
    parts = [preferences(model, batch, mode, **settings.preference_options) for batch in batches]
    losses = np.concatenate([np.array(part.losses) for part in parts])
    margins = np.concatenate([np.array(part.margins) for part in parts])
    return {
        "loss": float(losses.mean(dtype=np.float64)),
        "accuracy": float((margins > 0).mean()),
        "margin": float(margins.mean(dtype=np.float64)),
    }


def validation(
    data: Mapping[str, Samples[Any]], settings: FineTuneSettings
) -> Callable[[Decoder], dict[str, float]] | None:
    """Maps a model to its figures on the validation samples, if there are any."""
    if "valid" not in data:
        return None
    batches = evaluation_batches(
        data["valid"].samples,
        settings.batch_size,
        settings.val_batches,
        settings.seed,
        batch_maker(data["valid"], settings),
    )

    def validate(model: Decoder) -> dict[str, float]:
        figures = _figures(model, batches, settings)
        return {f"valid_{name}": figure for name, figure in figures.items()}

    return validate
