"""Times this library's models of images."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..hub import load_model
from ..platform.allocator import keep_freed_memory
from .benchmark_images import WARM_UP, ImageSettings, Run, images
from .benchmark_rounds import elapsed


def run(folder: Path, settings: ImageSettings, threads: int) -> Run:
    """Times passes through the model of a folder, for each number of images at a time."""
    mx.set_default_device(mx.Device(mx.cpu))
    keep_freed_memory()
    model = load_model(folder, dtype=mx.float32)
    model.eval()
    config = model.config
    given = images(max(settings.batch_sizes), config.image_size, config.input_channels)
    seconds = {}
    for batch_size in settings.batch_sizes:
        batch = mx.array(given[:batch_size])
        compute = partial(_pass, model, batch)
        times = [elapsed(compute) for _ in range(settings.rounds + WARM_UP)]
        seconds[str(batch_size)] = times[WARM_UP:]
    logits = np.array(model(mx.array(given[:1]))[0])
    return Run(seconds, [float(logit) for logit in logits])


def _pass(model: Any, batch: mx.array) -> None:
    mx.eval(model(batch))
