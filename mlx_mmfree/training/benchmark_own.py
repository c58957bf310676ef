"""Times this library's training steps."""

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..models import Decoder, find
from ..platform.allocator import keep_freed_memory
from .adamw import AdamW
from .batches import Batch
from .benchmark import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WARM_UP, WEIGHT_DECAY, Run, Setup
from .data_parallel import DataParallel
from .loop_settings import LoopSettings
from .loss import next_token_loss
from .optimizer_step import OptimizerStep

_TERNARY = {"quantization_config": {"quant_method": "bitnet"}}


def run(setup: Setup, program: str, threads: int) -> Run:
    """Trains the dense or the ternary model and times each step."""
    mx.set_default_device(mx.Device(mx.cpu))
    keep_freed_memory()
    step = OptimizerStep(
        _model(setup, program),
        LoopSettings(Path(), setup.steps + WARM_UP, clip_norm=CLIP_NORM),
        AdamW(
            learning_rate=LEARNING_RATE,
            betas=list(BETAS),
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            bias_correction=True,
        ),
        lambda step: mx.array(LEARNING_RATE),
        lambda step: [Batch.of_rows(setup.rows(step))],
        next_token_loss,
        DataParallel(),
    )
    result = Run([], [], [])
    for number in range(setup.steps + WARM_UP):
        start = time.perf_counter(), time.process_time()
        done = step(number)
        if number >= WARM_UP:
            result.seconds.append(time.perf_counter() - start[0])
            result.processor_seconds.append(time.process_time() - start[1])
        result.losses.append(done.loss / done.tokens)
    return result


def _model(setup: Setup, program: str) -> Decoder:
    architecture = find("llama")
    config = setup.config() | (_TERNARY if program == "ternary" else {})
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    parameters: Any = tree_flatten(model.parameters())
    weights = [(name, mx.array(setup.weight(name, weight.shape))) for name, weight in parameters]
    model.update(tree_unflatten(weights))
    model.train()
    mx.eval(model.parameters())
    return model
