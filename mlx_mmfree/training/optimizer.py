"""Optimizers and learning-rate schedules of training runs."""

from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import TrainingError
from ..ops import adamw, long_mean
from .run_settings import checked, finite, listed
from .settings import INVERSE_SQRT, Settings


class AdamW(optim.AdamW):
    """MLX's AdamW, with the same arguments, state and bits, for float32 in one operation.

    Args: as of `mlx.optimizers.AdamW`.
    """

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        arrays = (parameter, gradient, state["m"], state["v"])
        if any(array.dtype != mx.float32 for array in arrays):
            result: mx.array = super().apply_single(gradient, parameter, state)
            return result
        b1, b2 = self.betas
        result, state["m"], state["v"] = adamw(
            *arrays, self._factors(), betas=(b1, b2), eps=self.eps
        )
        return result

    def _factors(self) -> mx.array:
        """The factors of the parameter, the first moment and the root of the second."""
        rate = self.learning_rate.astype(mx.float32)
        numerator, denominator = rate, mx.ones(())
        if self.bias_correction:
            b1, b2 = self.betas
            numerator = (rate / (1 - b1**self.step)).astype(mx.float32)
            denominator = mx.rsqrt(1 - b2**self.step).astype(mx.float32)
        return mx.stack([1 - rate * self.weight_decay, numerator, denominator])


BLOCK = 256
"""The numbers that share a scale."""

MIN_SIZE = 4096
"""Smaller arrays, such as norms and biases, keep their moments in float32."""

_CHUNK = 2**22
"""The most numbers that are updated at a time, in whole blocks."""

_DECADES = 7


class AdamW8bit(optim.AdamW):
    """MLX's AdamW, whose state takes about a quarter of the memory.

    In each block of `BLOCK` numbers, a moment is an 8-bit code for each number and one float32 scale,
    the largest magnitude. The codes stand for the values of the dynamic map of the paper, which are
    dense near the scale and reach seven decades below it.

    Unlike there, the codes of the second moment stand for its square root, which spans half as many
    decades, and none of them stands for zero, which a first moment would be divided by. Where gradients
    in a block differ by up to three decades, weights after 30 steps are then 5.9 % from AdamW's instead
    of 8.6 %.

    Args: as of `mlx.optimizers.AdamW`.
    """

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        super().init_single(parameter, state)
        if parameter.size >= MIN_SIZE:
            state |= _encoded_moments(state)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        if isinstance(state["m"], mx.array):
            result: mx.array = super().apply_single(gradient, parameter, state)
            return result
        names = [(moment, part) for moment in "mv" for part in ("codes", "scales")]
        numbers = [gradient.reshape(-1), parameter.reshape(-1)]
        moments = [state[moment][part] for moment, part in names]
        chunks: list[list[mx.array]] = []
        for start in range(0, parameter.size, _CHUNK):
            own = slice(start, start + _CHUNK)
            blocks = slice(start // BLOCK, (start + _CHUNK) // BLOCK)
            given: Any = [*(a[own] for a in numbers), *(a[blocks] for a in moments)]
            # what a chunk takes is free before the next one begins
            given = mx.depends(given, chunks[-1]) if chunks else given
            chunks.append(self._updated(*given))
        weight, *new = (mx.concatenate(list(parts)) for parts in zip(*chunks, strict=True))
        for (moment, part), array in zip(names, new, strict=True):
            state[moment] = state[moment] | {part: array}
        return weight.reshape(parameter.shape)

    def _updated(self, gradient: mx.array, parameter: mx.array, *old: mx.array) -> list[mx.array]:
        """New numbers, and the codes and scales of both moments, of old ones."""
        first, second = ({"codes": old[n], "scales": old[n + 1]} for n in (0, 2))
        moments = {
            "m": decoded(first, True, parameter.shape),
            "v": decoded(second, False, parameter.shape).square(),
        }
        weight = super().apply_single(gradient, parameter, moments)
        new = _encoded_moments(moments)
        return [weight, *(new[moment][part] for moment in "mv" for part in ("codes", "scales"))]


def _encoded_moments(moments: dict[str, Any]) -> dict[str, Any]:
    return {"m": encoded(moments["m"], True), "v": encoded(mx.sqrt(moments["v"]), False)}


def encoded(values: mx.array, is_signed: bool) -> dict[str, mx.array]:
    """Values of any shape as `codes`, uint8 `(blocks, BLOCK)`, and `scales`, float32 `(blocks, 1)`.

    A number gets the code whose value is nearest to it, once it is divided by its scale and rounded to
    bfloat16. Without `is_signed`, all of them must be at least 0.
    """
    flat = values.astype(mx.float32).reshape(-1)
    blocks = mx.pad(flat, [(0, -flat.size % BLOCK)]).reshape(-1, BLOCK)
    scales = mx.abs(blocks).max(axis=1, keepdims=True)
    rounded = (blocks / mx.maximum(scales, 1e-38)).astype(mx.bfloat16)
    return {"codes": _codes_of_bfloat16(is_signed)[rounded.view(mx.uint16)], "scales": scales}


def decoded(stored: dict[str, mx.array], is_signed: bool, shape: tuple[int, ...]) -> mx.array:
    """The float32 values, of a shape, that `encoded` made codes of."""
    values = mx.array(dynamic_map(is_signed))[stored["codes"]] * stored["scales"]
    return values.reshape(-1)[: int(np.prod(shape))].reshape(shape)


@cache
def dynamic_map(is_signed: bool) -> np.ndarray:
    """The values of the 256 codes, rising, float32.

    Of the decades from 1e-7 to 1, each is cut into twice as many equal parts as the one below. The
    values are the middles of these parts, and their negatives if `is_signed`, and 1, and 0 if
    `is_signed` or else 1e-7.
    """
    values = [1.0, 0.0 if is_signed else 10.0**-_DECADES]
    for decade in range(_DECADES):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not is_signed)) + 1)
        middles = 10.0 ** (decade + 1 - _DECADES) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if is_signed else [])]
    return np.sort(np.array(values, np.float32))


@cache
def _codes_of_bfloat16(is_signed: bool) -> mx.array:
    """The code of each of the 65,536 numbers in bfloat16."""
    numbers = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    values = dynamic_map(is_signed)
    codes = mx.array(np.searchsorted((values[1:] + values[:-1]) / 2, numbers).astype(np.uint8))
    mx.eval(codes)
    return codes


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

    The decay follows a cosine, or for step :math:`s`, counted from 1, of :math:`w` of the warm-up

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
            start; `warmup`, the number of steps of the warm-up (0); `warmup_init`, the learning
            rate at its start (0).

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
