"""The rules that the settings of a fine-tuning run must keep."""

import math
from typing import TYPE_CHECKING, get_args

from ..errors import TrainingError
from .optimizer import OPTIMIZERS, SCHEDULES, named_optimizer, named_schedule
from .precision import ADAPTER_DTYPES, COMPUTE_DTYPES
from .preference_loss import LossType, TrainMode

if TYPE_CHECKING:
    from .fine_tune_settings import FineTuneSettings

KINDS = ("lora", "dora", "full")
TRAIN_MODES = ("sft", *get_args(TrainMode))
LOSS_TYPES = get_args(LossType)

_POSITIVE = (
    "batch_size",
    "iters",
    "learning_rate",
    "steps_per_report",
    "steps_per_eval",
    "grad_accumulation_steps",
    "save_every",
    "rank",
    "teacher_weight",
    "teacher_temperature",
    "process_timeout_s",
    "beta",
)


def check_rules(settings: "FineTuneSettings") -> None:
    """Refuses values that are out of range, unknown, or do not go together.

    Raises:
        TrainingError: A value is wrong. The message names it.
    """
    for name in _POSITIVE:
        _check(settings, name, 0 < getattr(settings, name) < math.inf, "positive")
    for name in ("num_layers", "val_batches", "test_batches"):
        value = getattr(settings, name)
        _check(settings, name, value == -1 or value > 0, "positive, or -1 for all,")
    for name in ("clip_norm", "patience", "seed", "quantization_warmup"):
        _check(settings, name, 0 <= getattr(settings, name) < math.inf, "at least 0")
    _check(settings, "max_seq_length", settings.max_seq_length >= 2, "at least 2")
    _check(settings, "dropout", 0 <= settings.dropout < 1, "at least 0 and below 1")
    _check(
        settings, "fine_tune_type", settings.fine_tune_type in KINDS, "one of " + ", ".join(KINDS)
    )
    for name, values in (("train_mode", TRAIN_MODES), ("loss_type", LOSS_TYPES)):
        _check(settings, name, getattr(settings, name) in values, "one of " + ", ".join(values))
    known = ", ".join(OPTIMIZERS)
    _check(settings, "optimizer", settings.optimizer in OPTIMIZERS, f"one of {known}")
    options = settings.optimizer_config.get(settings.optimizer)
    named_optimizer(settings.optimizer, settings.learning_rate, options)
    dtypes = COMPUTE_DTYPES if settings.is_full else ADAPTER_DTYPES
    is_known = settings.dtype is None or settings.dtype in dtypes
    _check(
        settings, "dtype", is_known, f"one of {', '.join(dtypes)} with {settings.fine_tune_type}"
    )
    if settings.lr_schedule is not None:
        schedule = settings.lr_schedule.get("name")
        is_known = isinstance(schedule, str) and schedule in SCHEDULES
        _check(settings, "lr_schedule", is_known, f"named one of {', '.join(SCHEDULES)}")
        named_schedule(settings.lr_schedule)
    if settings.teacher is None and settings.teacher_top_k is not None:
        raise TrainingError(
            "[lora] 'teacher_top_k' must come with 'teacher' but came alone. Name a teacher."
        )
    if settings.is_full and settings.resume_adapter_file is not None:
        raise TrainingError(
            "[lora] 'resume_adapter_file' must be left out for full fine-tuning, which trains no "
            "adapter. Give the folder of the model to begin with as 'model'."
        )

    _check_preferences(settings)


def _check_preferences(settings: "FineTuneSettings") -> None:
    """Refuses settings of preferences without them, and what does not go with them."""
    if settings.learns_preferences and (settings.pack or settings.teacher is not None):
        name = "pack" if settings.pack else "teacher"
        raise TrainingError(
            f"[lora] '{name}' must be left out with 'train_mode' {settings.train_mode} but was given. "
            "It goes with 'train_mode' sft."
        )
    for name, modes in (
        ("beta", ("dpo", "orpo")),
        ("loss_type", ("dpo",)),
        ("reference_model_path", ("dpo",)),
    ):
        default = settings.__dataclass_fields__[name].default
        if settings.train_mode not in modes and getattr(settings, name) != default:
            raise TrainingError(
                f"[lora] '{name}' must come with 'train_mode' {' or '.join(modes)} but got "
                f"{settings.train_mode!r}. Leave it out."
            )


def _check(settings: "FineTuneSettings", name: str, is_sound: bool, rule: str) -> None:
    if not is_sound:
        raise TrainingError(f"[lora] '{name}' must be {rule} but got {getattr(settings, name)!r}.")
