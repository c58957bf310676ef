"""Optimizers and learning-rate schedules of training runs."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import TrainingError
from ..ops import long_mean
from .adamw import AdamW
from .adamw_8bit import AdamW8bit
from .run_settings import checked, finite, listed
from .settings import INVERSE_SQRT, Settings


def build_optimizer(settings: Settings) -> optim.MultiOptimizer:
    """AdamW (arXiv 1711.05101) with weight decay on matrices only."""
    kind = OPTIMIZERS[settings.optimizer]

    def adamw(weight_decay: float) -> optim.Optimizer:
        optimizer: optim.Optimizer = kind(
            # each step has its own
            learning_rate=0.0,
            betas=list(settings.betas),
            weight_decay=weight_decay,
            bias_correction=True,
        )
        return optimizer

    def is_matrix(path: str, weight: mx.array) -> bool:
        return path.endswith("weight") and weight.ndim == 2

    return MultiOptimizer([adamw(settings.weight_decay), adamw(0.0)], [is_matrix])


class MultiOptimizer(optim.MultiOptimizer):
    """MLX's, which fails to put lists of modules together of which some have no parameters."""

    def apply_gradients(self, gradients: dict[str, Any], parameters: dict[str, Any]) -> Any:
        updated: dict[str, mx.array] = {}
        parts = self._split_dictionary(gradients)
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            updated |= dict(tree_flatten(optimizer.apply_gradients(part, parameters)))
        return tree_unflatten(list(updated.items()))


def build_schedule(settings: Settings, dims: int) -> Callable[[int], mx.array]:
    r"""Maps a step to its learning rate: a linear warm-up to the peak, then a decay.

    The decay is that of a cosine, or for step :math:`s`, counted from 1, of :math:`w` of the warm-up

    .. math::
        \text{peak}\,\min\!\left(\sqrt{w / s},\; s / w\right),

    which for the peak :math:`(d w)^{-1/2}` is :math:`d^{-1/2} \min(s^{-1/2}, s\,w^{-3/2})` (Vaswani et
    al., arXiv 1706.03762, equation 3).

    Args:
        settings: The run.
        dims: Model dims :math:`d`.
    """
    peak = settings.peak_learning_rate(dims)
    if settings.schedule == INVERSE_SQRT:
        steps = settings.warmup_steps
        return lambda step: mx.array(peak * min((steps / (step + 1)) ** 0.5, (step + 1) / steps))
    end = peak * settings.final_learning_rate
    cosine = optim.cosine_decay(peak, settings.steps - settings.warmup_steps, end)
    if settings.warmup_steps:
        warmup = optim.linear_schedule(peak / settings.warmup_steps, peak, settings.warmup_steps)
        schedule = optim.join_schedules([warmup, cosine], [settings.warmup_steps])
    else:
        schedule = cosine
    return lambda step: schedule(mx.array(step))


class Adafactor(optim.Adafactor):
    """MLX's Adafactor (arXiv 1804.04235), with accurate mean squares of large matrices on a CPU."""

    def _compute_rms(self, inputs: mx.array) -> mx.array:
        return mx.sqrt(long_mean(inputs.astype(mx.float32).square())).astype(inputs.dtype)


OPTIMIZERS = {
    "adam": optim.Adam,
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "sgd": optim.SGD,
    "adafactor": Adafactor,
    "muon": optim.Muon,
}

SCHEDULES: dict[str, Any] = {
    "cosine_decay": optim.cosine_decay,
    "exponential_decay": optim.exponential_decay,
    "linear_schedule": optim.linear_schedule,
    "step_decay": optim.step_decay,
}

# otherwise Adafactor ignores the learning rate that it is given
_DEFAULTS: dict[str, dict[str, Any]] = {"adafactor": {"relative_step": False}}


def named_optimizer(
    name: str, learning_rate: float, options: Mapping[str, Any] | None = None
) -> optim.Optimizer:
    """One of MLX's optimizers.

    Args:
        name: Its name in `OPTIMIZERS`.
        learning_rate: The learning rate.
        options: Further arguments of the optimizer.

    Raises:
        TrainingError: An option is unknown, or its value is of another kind than its default.
    """
    kind = OPTIMIZERS[name]
    known = {key: each.default for key, each in signature(kind).parameters.items()}
    del known["learning_rate"]
    try:
        given = dict(options or {})
        if unknown := given.keys() - known:
            raise ValueError(
                f"{', '.join(sorted(map(str, unknown)))} is not one of {', '.join(known)}"
            )
        values = {key: _like(key, value, known[key]) for key, value in given.items()}
        optimizer: optim.Optimizer = kind(
            learning_rate=learning_rate, **(_DEFAULTS.get(name, {}) | values)
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise TrainingError(
            f"[lora] 'optimizer_config' must hold options of {name} but got {options!r:.200}: {error}."
        ) from error
    return optimizer


def _like(name: str, value: Any, default: Any) -> Any:
    """A value of the kind of an option's default: true or false, a number, or a list of numbers."""
    if not isinstance(default, (list, tuple)):
        return checked(name, value, float | None if default is None else type(default))
    if not isinstance(value, (list, tuple)) or len(value) != len(default):
        raise ValueError(f"'{name}' must be {len(default)} numbers but got {value!r:.80}")
    return [checked(name, each, float) for each in value]


def named_schedule(description: Mapping[str, Any]) -> Callable[[int], mx.array]:
    """One of MLX's schedules, optionally after a linear warm-up.

    Args:
        description: `name` in `SCHEDULES`; `arguments`, the first of which is the learning rate at the
            beginning; `warmup`, the number of steps of the warm-up (0); `warmup_init`, the learning
            rate at its beginning (0).

    Raises:
        TrainingError: A key is unknown, or the arguments do not fit the schedule.
    """
    keys = {"name", "arguments", "warmup", "warmup_init"}
    try:
        if unknown := description.keys() - keys:
            raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
        given = listed(description["arguments"], "arguments")
        arguments = [finite(value, "each of 'arguments'") for value in given]
        schedule = SCHEDULES[description["name"]](*arguments)
        if warmup := checked("warmup", description.get("warmup", 0), int):
            start = finite(description.get("warmup_init", 0.0), "'warmup_init'")
            rise = optim.linear_schedule(start, arguments[0], warmup)
            schedule = optim.join_schedules([rise, schedule], [warmup + 1])
        schedule(mx.array(0))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise TrainingError(
            "[lora] 'lr_schedule' must have name and arguments, and may have warmup and "
            f"warmup_init, but got {dict(description)}: {error}."
        ) from error
    return lambda step: mx.array(schedule(mx.array(step)))
