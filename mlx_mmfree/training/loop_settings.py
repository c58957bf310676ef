"""The settings of the training loop, which runs from texts and fine-tuning runs share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class LoopSettings:
    """How long the loop runs and how often it reports, validates and saves.

    Attributes:
        folder: Folder for the log, the loss curve and the checkpoint.
        steps: Number of optimizer steps.
        seed: Seed of dropout, together with the step.
        clip_norm: Largest norm of the gradient; 0 turns clipping off.
        steps_per_report: Steps between two lines of the log.
        steps_per_eval: Steps between two validations.
        save_every: Steps between two checkpoints.
        patience: Number of validations in a row without a better loss after which the run ends; 0
            turns this off.
        validates_first: Whether to validate before the first step too.
        quantization_warmup: Steps over which weights and activations of ternary layers change from
            float to quantised; 0 quantises them from the start. Validations always quantise them.
        dtype: The float dtype that steps compute in, whatever that of the trained parameters; `None`
            computes in their own. Validations always do.
        clear_cache_bytes: MLX's cache is cleared after a step that leaves it larger than this; `None`
            never clears it.
        unit: What the log counts as tokens, in the words of the progress bar.
        record: Plain values that must be the same when the run is resumed. Its `steps`, if it has
            them, may grow once the run is finished.
    """

    folder: Path
    steps: int
    seed: int = 0
    clip_norm: float = 0.0
    steps_per_report: int = 10
    steps_per_eval: int = 200
    save_every: int = 100
    patience: int = 0
    validates_first: bool = False
    quantization_warmup: int = 0
    dtype: mx.Dtype | None = None
    clear_cache_bytes: int | None = None
    unit: str = "tokens"
    record: dict[str, Any] = field(default_factory=dict)
