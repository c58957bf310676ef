"""What a program must know to call an exported step."""

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from ...models import Decoder
from ...ops.backend.dispatch import on_cpu
from ...ops.backend.kept_results import mlx_version
from ...tokenizer.tokenizer import Tokenizer
from ...version import __version__
from .check import Example
from .step import TOKEN_DTYPE, DecodingStep, uniform

FORMAT_VERSION = 1


def describe(
    model: Decoder,
    tokenizer: Tokenizer,
    step: DecodingStep,
    example: Example,
    operations: Mapping[str, int],
    weights_file: str | None,
) -> dict[str, Any]:
    """The content of the JSON file beside a step.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        step: The step.
        example: What it must do.
        operations: How often the function has each primitive of MLX.
        weights_file: The file of weights that are handed over by name, or `None` if they lie inside.
    """
    state = _forms(step.state.items())
    first = [{**each, "initial": uniform(step.state[each["name"]])} for each in state]
    token = {"name": "token", "shape": [1], "dtype": _dtype(TOKEN_DTYPE)}
    logits = {"name": "logits", "shape": [1, model.vocab_size], "dtype": _dtype(mx.float32)}
    return {
        "format": FORMAT_VERSION,
        "written_by": {"mlx_mmfree": __version__, "mlx": mlx_version()},
        "model_type": model.config.to_hub()["model_type"],
        "vocabulary": model.vocab_size,
        "known_tokens": min(tokenizer.vocab_size, model.vocab_size),
        "end_tokens": sorted(tokenizer.eos_token_ids),
        "most_tokens": step.room,
        "device": "cpu" if on_cpu() else "gpu",
        "operations": dict(operations),
        "start": {"inputs": [], "outputs": first},
        "step": {
            "inputs": [token, *state],
            "named_inputs": _forms(step.weights.items()) if weights_file else [],
            "outputs": [logits, *state],
        },
        "weights_file": weights_file,
        "example": {"prompt": example.prompt, "tokens": example.tokens},
    }


def _forms(arrays: Iterable[tuple[str, mx.array]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(array.shape), "dtype": _dtype(array.dtype)}
        for name, array in arrays
    ]


def _dtype(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
