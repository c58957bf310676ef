"""Writes one step of decoding as a file of MLX, with a description, and runs what was written."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...files.checkpoint_files import tokenizer_files
from ...files.json_file import write_json
from ...files.paths import real_path
from ...files.replacing import new_folder, writing
from ...files.safetensors_writer import PlannedTensors, write_safetensors
from ...hub.checkpoint.target_folder import check_target, copy_files
from ...models import Decoder
from ...ops.backend.dispatch import on_cpu, use_plain_operations
from ...ops.backend.gradient import without_gradients
from ...tokenizer.tokenizer import Tokenizer
from .check import Agreement, Example, agreement, check_equal, run
from .description import describe
from .step import TOKEN_DTYPE, DecodingStep

STEP_FILE, DESCRIPTION_FILE, WEIGHTS_FILE = "step.mlxfn", "step.json", "weights.safetensors"

_PROMPT = "Once upon a time"
_MOST_PROMPT = 8


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        folder: Where.
        is_plain: Whether the function holds no kernel of this library.
        room: The number of tokens that a state takes, or `None` for any.
        example: The tokens with which the step was run again.
        agreement: How near it is to the model as it runs here.
        sizes: The bytes of each file.
    """

    folder: Path
    is_plain: bool
    room: int | None
    example: Example
    agreement: Agreement
    sizes: dict[str, int]


def export_step(
    path: str | os.PathLike[str],
    model: Decoder,
    tokenizer: Tokenizer,
    *,
    context: int = 2048,
    weights_beside: bool = False,
    plain: bool = False,
    overwrite: bool = False,
) -> Export:
    """Writes one step of decoding as MLX's exported function, and runs it again before it is there.

    The file holds two functions, which MLX tells apart by their arguments. See `DecodingStep`.

    Args:
        path: The folder to make. It appears under its name only when it is complete.
        model: A causal model whose state has fixed shapes.
        tokenizer: Its tokenizer, whose files are copied.
        context: The number of tokens that attention has room for, at least.
        weights_beside: Whether weights are written to a file of their own, and are handed to each step.
        plain: Whether kernels of this library are left out. On a CPU they always are.
        overwrite: Replace an existing folder.

    Raises:
        CheckpointError: The folder exists or cannot be written, or what was written computes something
            else.
        NumericalError: The logits are not finite.
        UnsupportedModelError: The model cannot be exported.
        ValueError: `context` is too small.
    """
    if context < 1:
        raise ValueError(f"[export] 'context' must be at least 1 but got {context}.")
    target = real_path(path)
    check_target(target, overwrite, "export", [tokenizer.folder])
    step = DecodingStep(model, context)
    # what MLX cannot write: the C++ kernels, which are primitives of this library
    is_plain = plain or on_cpu()
    needed = sum(array.nbytes for array in step.weights.values())
    with (
        writing("export", target),
        new_folder(target, replaces=overwrite, needed_bytes=needed) as new,
    ):
        weights = step.weights if weights_beside else {}
        if weights:
            write_safetensors(
                new / WEIGHTS_FILE, [PlannedTensors.of(*each) for each in weights.items()]
            )
        with use_plain_operations() if is_plain else nullcontext(), without_gradients():
            prompt = _prompt(tokenizer)
            expected = run(step(), step, prompt)
            _write_function(new / STEP_FILE, step, weights)
            operations = _operations(step, weights)
        imported = _imported(new, weights_beside)
        found = run(imported(), imported, prompt)
        check_equal(found, expected)
        near = agreement(found, model)
        write_json(
            new / DESCRIPTION_FILE,
            describe(
                model, tokenizer, step, found.example, operations, WEIGHTS_FILE if weights else None
            ),
        )
        copy_files(tokenizer_files(tokenizer.folder), new)
        files = sorted(file for file in new.rglob("*") if file.is_file())
        sizes = {file.relative_to(new).as_posix(): file.stat().st_size for file in files}
    return Export(target, is_plain, step.room, found.example, near, sizes)


def _prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(_PROMPT)[:_MOST_PROMPT] or [0]


def _arguments(step: DecodingStep) -> list[mx.array]:
    return [mx.array([0], TOKEN_DTYPE), *step.state.values()]


def _write_function(file: Path, step: DecodingStep, weights: dict[str, mx.array]) -> None:
    try:
        with mx.exporter(str(file), step) as exporter:
            exporter()
            exporter(*_arguments(step), **weights)
    except ValueError as error:
        raise UnsupportedModelError(
            f"[export] each operation must be one that MLX can write but: {error} Export another model."
        ) from error


def _imported(folder: Path, weights_beside: bool) -> Callable[..., Any]:
    """The written function as a stranger reads it, from the files alone."""
    function: Any = mx.import_function(str(folder / STEP_FILE))
    read: Any = mx.load(str(folder / WEIGHTS_FILE)) if weights_beside else {}
    return lambda *arrays: function(*arrays, **read) if arrays else function()


def _operations(step: DecodingStep, weights: dict[str, mx.array]) -> Counter[str]:
    """How often a step has each primitive of MLX."""
    found: Counter[str] = Counter()

    def count(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            found[event["name"]] += 1

    named: Any = weights
    mx.export_function(count, step, *_arguments(step), **named)
    return found
