"""Output of a run on the terminal: its weights and its data first, then lines of its metrics."""

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_reduce

from ..layers.matrix import Matrix, matrices
from ..platform.progress import Progress
from ..platform.terminal import counted
from .results import Callback

_GB, _TRIT_BITS = 1e9, 2
_METRICS = ("reward", "reward_std", "completion_tokens")


class StepReports(Callback):
    """Prints a line for each report and each validation on stdout, above the bar if there is one.

    Args:
        steps: The steps of the run; of several stages, each tells its own.
        unit: What is counted as tokens.
    """

    def __init__(self, steps: int | None = None, unit: str = "tokens"):
        self._steps = steps
        self._unit = unit

    def on_start(self, words: str) -> None:
        _write(words)

    def on_begin(self, step: int) -> None:
        if step and step == self._steps:
            _write(
                f"The run has done {counted(step, 'step')} of {step} before. Give more steps to go on, "
                "or another folder to begin anew."
            )
        elif step:
            _write(f"The run goes on after step {step}.")

    def on_train(self, record: Mapping[str, Any]) -> None:
        more = (f"{_named(key)} {record[key]:.4g}, " for key in _METRICS if key in record)
        _write(
            f"{self._step(record)}: loss {record['loss']:.4f}, {''.join(more)}learning rate "
            f"{record['learning_rate']:.3g}, {record['tokens_per_second']:,.0f} {self._unit}/s, peak "
            f"memory {record['peak_memory_bytes'] / _GB:.3f} GB"
        )

    def on_validation(self, record: Mapping[str, Any]) -> None:
        found = {
            key.removeprefix("valid_"): value
            for key, value in record.items()
            if key.startswith("valid_") and isinstance(value, float)
        }
        words = ", ".join(f"{_named(key)} {value:.4f}" for key, value in found.items())
        _write(f"{self._step(record)}: validation {words}")

    def _step(self, record: Mapping[str, Any]) -> str:
        of_all = "" if self._steps is None else f" of {self._steps}"
        return f"Step {record['step']}{of_all}"


def _named(key: str) -> str:
    return key.replace("_std", " deviation").replace("_", " ")


def _write(line: str) -> None:
    """Prints a line; a bar on the terminal goes below it."""
    Progress.write(line, file=sys.stdout)
    sys.stdout.flush()


def array_sizes(tree: Any) -> int:
    """The number of values in a tree of arrays."""
    count: int = tree_reduce(lambda total, array: total + array.size, tree, 0)
    return count


def parameter_count(model: nn.Module) -> int:
    """The number of a model's parameters. Each packed code counts as one."""
    count = array_sizes(model.parameters())
    packed = [matrix for matrix in matrices(model).values() if matrix.is_packed]
    return count + sum(_size(matrix) - matrix.layer.weight.size for matrix in packed)


def describe_weights(model: nn.Module) -> str:
    r"""The numbers of parameters and of ternary ones among them, and the formats of the weights.

    Example:
        >>> from mlx_mmfree import demo, load_model
        >>> print(*describe_weights(load_model(demo.path())).split(". "), sep="\n")
        The model has 9,259,801 parameters, 8,454,144 of them ternary
        Its matrices are stored as 2-bit trits and float32.
    """
    own = [matrix for matrix in matrices(model).values() if not matrix.is_shared]
    formats: Counter[str] = Counter()
    for matrix in own:
        formats[_format(matrix)] += _size(matrix)
    names = " and ".join(name for name, _ in formats.most_common())
    ternary = sum(_size(matrix) for matrix in own if _is_ternary(matrix))
    words = f"The model has {parameter_count(model):,} parameters, {ternary:,} of them ternary."
    return f"{words} Its matrices are stored as {names}." if names else words


def _size(matrix: Matrix) -> int:
    return matrix.output_dims * matrix.input_dims


def _is_ternary(matrix: Matrix) -> bool:
    return (
        matrix.is_ternary
        or matrix.holds_trits
        or (matrix.holds_codes and matrix.layer.bits == _TRIT_BITS)
    )


def _format(matrix: Matrix) -> str:
    if matrix.holds_trits:
        return f"{_TRIT_BITS}-bit trits"
    if matrix.holds_codes:
        return f"{matrix.layer.bits}-bit codes"
    dtype = str(matrix.layer.weight.dtype).removeprefix("mlx.core.")
    return f"{dtype} rounded to ternary" if matrix.is_ternary else dtype
