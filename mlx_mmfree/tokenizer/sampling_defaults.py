"""Sampling defaults in a model's files: `generation_config.json`, and GGUF metadata.

The keys of `generation_config.json` are transformers'. Further keys of GGUF files have the name that
they have there. A penalty without `penalty_last_n` looks at the whole text, as in transformers.

Parsers of commands read the usual values, so that NumPy is imported where a GGUF file needs it.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files.checkpoint_files import GENERATION_FILE
from ..files.reading import read_json_object

USUAL: Mapping[str, float] = {
    "temp": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "min_tokens_to_keep": 1,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "repetition_penalty": 1.0,
    "repetition_context_size": 20,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The settings of sampling where neither a user nor the model says anything."""

GGUF_KEY = "general.sampling."
LONGEST = 2**17
"""The tokens that a penalty looks at where it looks at the whole text."""

_LLAMA_CPP_LAST = 64
"""The tokens that llama.cpp's penalty looks at where a file does not say."""


@dataclass(frozen=True)
class _Value:
    """A number of the files.

    Attributes:
        key: Its name in `generation_config.json`.
        gguf: Its name under `general.sampling.`.
        rule: What it must be, as text.
        fits: Whether a finite number is so.
        is_whole: Whether it must be a whole number.
    """

    key: str
    gguf: str
    rule: str
    fits: Callable[[float], bool]
    is_whole: bool = False


def _share(value: float) -> bool:
    return 0 <= value <= 1


def _count(value: float) -> bool:
    return -1 <= value < 2**31


_VALUES = (
    _Value("temperature", "temp", "a number from 0", lambda value: value >= 0),
    _Value("top_p", "top_p", "a number above 0 and up to 1", lambda value: 0 < value <= 1),
    _Value("top_k", "top_k", "a whole number from 0, or -1", _count, is_whole=True),
    _Value("min_p", "min_p", "a number from 0 to 1", _share),
    _Value("repetition_penalty", "penalty_repeat", "a number above 0", lambda value: value > 0),
    _Value(
        "penalty_last_n", "penalty_last_n", "a whole number from 0, or -1", _count, is_whole=True
    ),
    _Value("xtc_probability", "xtc_probability", "a number from 0 to 1", _share),
    _Value("xtc_threshold", "xtc_threshold", "a number from 0 to 1", _share),
)


def _checked(given: Mapping[str, Any], file: str, prefix: str = "") -> dict[str, Any]:
    """The values that a file gives, by their keys in `generation_config.json`.

    Args:
        given: The values; `None` is none.
        file: The file, for messages.
        prefix: What the names begin with in a GGUF file.
    """
    found: dict[str, Any] = {}
    for each in _VALUES:
        name = f"{prefix}{each.gguf}" if prefix else each.key
        value = given.get(name)
        if value is None:
            continue
        kinds = (int,) if each.is_whole else (int, float)
        # which NaN is not either
        is_finite = type(value) in kinds and abs(value) <= sys.float_info.max
        if not is_finite or not each.fits(value):
            raise CheckpointError(
                f"[{file}] '{name}' must be {each.rule} but got {value!r:.80}. Correct it, or leave it "
                "out."
            )
        found[each.key] = value if each.is_whole else float(value)
    return found


def read_sampling(folder: Path) -> dict[str, float]:
    """How a model's texts are sampled, as its `generation_config.json` says.

    Args:
        folder: The folder of its small files.

    Returns:
        The values of `make_sampler` and `make_processors`; none if the file says nothing of it. A file
        with `do_sample` false gives the temperature 0.

    Raises:
        CheckpointError: A value has the wrong type or range.
    """
    found = _read(folder)
    samples = found.pop("do_sample", None)
    names = {"temperature": "temp"}
    values: dict[str, float] = {names.get(key, key): value for key, value in found.items()}
    if samples is not None:
        values["temp"] = values.get("temp", 1.0) if samples else 0.0
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)
    last = values.pop("penalty_last_n", -1)
    if "repetition_penalty" in values:
        values["repetition_context_size"] = min(last, LONGEST) if last > 0 else LONGEST
        if last == 0:
            del values["repetition_penalty"], values["repetition_context_size"]
    if values.get("xtc_threshold", 0.0) > 0.5:
        # no two tokens are so likely
        del values["xtc_threshold"]
        values["xtc_probability"] = 0.0
    return values


def _read(folder: Path) -> dict[str, Any]:
    """The values of the file, and `do_sample` if it is there."""
    given = read_json_object(folder / GENERATION_FILE, is_optional=True)
    found, samples = _checked(given, GENERATION_FILE), given.get("do_sample")
    if samples is None:
        return found
    if not isinstance(samples, bool):
        raise CheckpointError(
            f"[{GENERATION_FILE}] 'do_sample' must be true or false but got {samples!r:.80}. Correct "
            "it, or leave it out."
        )
    return {**found, "do_sample": samples}


def sampling_of_gguf(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The sampling defaults of GGUF metadata, by the keys of `generation_config.json`.

    Returns:
        These values, and the names of the keys that are not read.

    Raises:
        CheckpointError: A value has the wrong type or range.
    """
    import numpy as np

    known = {GGUF_KEY + each.gguf for each in _VALUES}
    others = sorted(key for key in metadata if key.startswith(GGUF_KEY) and key not in known)
    found = _checked(metadata, "GGUF", GGUF_KEY)
    # the shortest decimal for 32 bits
    values = {
        key: float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in found.items()
    }
    if "repetition_penalty" in values:
        values.setdefault("penalty_last_n", _LLAMA_CPP_LAST)
    if "temperature" in values:
        values["do_sample"] = values["temperature"] > 0
        if not values["do_sample"]:
            # transformers takes no temperature of 0
            del values["temperature"]
    return values, tuple(others)


def sampling_to_gguf(folder: Path) -> dict[str, Any]:
    """The metadata of a GGUF file for what the `generation_config.json` of a folder says.

    Raises:
        CheckpointError: A value has the wrong type or range.
    """
    import numpy as np

    found = _read(folder)
    samples = found.pop("do_sample", None)
    if samples is not None:
        found["temperature"] = found.get("temperature", 1.0) if samples else 0.0
    if "repetition_penalty" in found:
        found.setdefault("penalty_last_n", -1)
    return {
        GGUF_KEY + each.gguf: np.int32(found[each.key]) if each.is_whole else float(found[each.key])
        for each in _VALUES
        if each.key in found
    }
