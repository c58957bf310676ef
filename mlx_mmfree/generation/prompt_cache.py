"""Saves what a model has read, so that a long prompt is read only once.

A file is safetensors: the token ids under `tokens`, each array of the state under `state.` and its
path in the tree, and metadata that say which model made it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map, tree_reduce

from ..errors import CheckpointError
from ..files.reading import expanded, parse_json, real_path
from ..files.tensors import TensorEntry, read_header, read_tensors
from ..files.writing import new_file, writing
from ..hub.checkpoint.save import write_tensors
from ..models import Decoder
from ..models.parts.token_checks import check_tokens, token_array
from .reader import PREFILL_STEP_SIZE, Progress, prefill
from .states import arrays_by_path, blank_state, fingerprint, trimmed_state

FORMAT_VERSION = "1"

_FORMAT, _MODEL, _SETTINGS = "mmfree_prompt_cache", "mmfree_model", "mmfree_key_values"
_TOKENS, _STATE = "tokens", "state."

Settings = Mapping[str, int | None]


@dataclass(frozen=True)
class PromptCache:
    """The tokens that a model has read, and its state.

    Attributes:
        tokens: The ids that were read.
        state: The model's state after them, for the argument `state` of `generate`.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> cache = cache_prompt(model, tokenizer.encode("Once upon a"))
        >>> generate(model, tokenizer, " time", state=cache.state, max_tokens=4)
        ', there was a'
    """

    tokens: list[int]
    state: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return cast(int, tree_reduce(lambda total, array: total + array.nbytes, self.state, 0))


def cache_prompt(
    model: Decoder,
    tokens: Sequence[int],
    *,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Progress | None = None,
) -> PromptCache:
    """Reads a prompt.

    Args:
        model: Reads it.
        tokens: Its ids, at least one.
        prefill_step_size: Positions read at a time.
        prompt_progress_callback: Takes how many tokens are read, and how many there are.

    Returns:
        The tokens and the state after them.

    Raises:
        ValueError: There is no token, or one is outside the vocabulary.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> cache = cache_prompt(model, tokenizer.encode("Once upon a"))
        >>> len(cache.tokens), cache.nbytes
        (3, 6144)
    """
    state = prefill(
        model,
        token_array(tokens, model.vocab_size),
        step_size=prefill_step_size,
        progress=prompt_progress_callback,
    )
    return _trimmed(model, PromptCache([int(token) for token in tokens], state))


def save_prompt_cache(
    path: str | os.PathLike[str],
    model: Decoder,
    cache: PromptCache,
    settings: Settings | None = None,
) -> None:
    """Writes what a model has read to a file, whole or not at all; an older file is replaced.

    Args:
        path: The file.
        model: The model that read it.
        cache: What it read, a text without padding.
        settings: The arguments of `with_key_values` that the model was made with, for those who load
            the file.

    Raises:
        CheckpointError: The disk is full or the file cannot be written.
        ValueError: The state is not one that this model has after these tokens.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> cache = cache_prompt(model, tokenizer.encode("Once upon a"))
        >>> save_prompt_cache("story.safetensors", model, cache)
        >>> state = load_prompt_cache("story.safetensors", model).state
        >>> generate(model, tokenizer, " time", state=state, max_tokens=4)
        ', there was a'
    """
    file = expanded(path)
    cache = _trimmed(model, cache)
    arrays = {_TOKENS: mx.array(cache.tokens, mx.int32)}
    arrays |= {_STATE + key: array for key, array in arrays_by_path(cache.state).items()}
    metadata = {
        _FORMAT: FORMAT_VERSION,
        _MODEL: fingerprint(model),
        _SETTINGS: json.dumps(dict(settings or {})),
    }
    needed = sum(array.nbytes for array in arrays.values())
    with writing("prompt cache", file), new_file(file, needed) as new:
        write_tensors(new, arrays, metadata)


def read_settings(path: str | os.PathLike[str]) -> tuple[dict[str, int | None], int]:
    """The description of the model that made a file, without its state.

    Returns:
        The arguments of `with_key_values`, and the number of tokens.

    Raises:
        CheckpointError: The file is missing, damaged or no prompt cache.
    """
    file, entries, metadata = _header(path)
    try:
        settings = parse_json(metadata.get(_SETTINGS, "{}").encode())
    except ValueError as error:
        raise _problem(file, "has settings that are not JSON") from error
    if not isinstance(settings, dict) or not all(
        value is None or (isinstance(value, int) and not isinstance(value, bool))
        for value in settings.values()
    ):
        raise _problem(file, "has settings that are not whole numbers")
    return settings, _tokens_entry(file, entries).shape[0]


def load_prompt_cache(path: str | os.PathLike[str], model: Decoder) -> PromptCache:
    """Reads what the same model has read before.

    Args:
        path: A file of `save_prompt_cache`; it may come from anywhere.
        model: The model, made with the same settings for keys and values.

    Returns:
        The tokens and the state after them.

    Raises:
        CheckpointError: The file is missing or damaged, or another model made it.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> save_prompt_cache("once.safetensors", model, cache_prompt(model, [5, 7]))
        >>> load_prompt_cache("once.safetensors", model).tokens
        [5, 7]
    """
    file, entries, metadata = _header(path)
    if metadata.get(_MODEL) != fingerprint(model):
        raise CheckpointError(
            f"[prompt cache] '{file}' must come from the model that goes on with it but another one "
            "made it. Use the same model, adapter and dtype, or cache the prompt again."
        )
    tokens = _read_tokens(file, entries, model)
    blank = blank_state(model, 1, len(tokens))
    expected = arrays_by_path(blank)
    _check_entries(file, entries, expected)
    arrays = dict(read_tensors(file, entries.values()))
    for name, array in expected.items():
        loaded = arrays[_STATE + name]
        if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(loaded).all().item():
            raise _problem(file, "holds NaN or infinity")
    names = iter(expected)
    state = tree_map(lambda _: arrays[_STATE + next(names)], blank)
    cache = PromptCache(tokens, state)
    try:
        return _trimmed(model, cache)
    except ValueError as error:
        raise _problem(file, "has positions that its tokens do not have") from error


def _trimmed(model: Decoder, cache: PromptCache) -> PromptCache:
    """The cache without the space after its tokens, checked."""
    check_tokens(cache.tokens, model.vocab_size)
    state = trimmed_state(model, cache.state, len(cache.tokens))
    if state is None:
        raise ValueError(
            f"[prompt cache] 'cache' must hold the state that the model has after its "
            f"{len(cache.tokens)} tokens, read alone and without padding, but holds another."
        )
    return PromptCache(cache.tokens, state)


def _header(
    path: str | os.PathLike[str],
) -> tuple[Path, dict[str, TensorEntry], dict[str, str]]:
    # the user named this file, so that it may be a link
    file = real_path(path)
    if not file.exists():
        raise CheckpointError(
            f"[prompt cache] 'prompt_cache_file' must be a prompt cache but there is no file "
            f"'{file}'. Write one with 'mmfree cache_prompt'."
        )
    entries, metadata = read_header(file)
    if metadata.get(_FORMAT) != FORMAT_VERSION:
        raise CheckpointError(
            f"[prompt cache] '{file}' must be a prompt cache of version {FORMAT_VERSION} but is "
            f"{metadata.get(_FORMAT, 'another kind of file')!r:.40}. Write one with 'mmfree "
            "cache_prompt'."
        )
    return file, entries, metadata


def _tokens_entry(file: Path, entries: dict[str, TensorEntry]) -> TensorEntry:
    entry = entries.get(_TOKENS)
    if entry is None or entry.dtype != mx.int32 or len(entry.shape) != 1 or not entry.shape[0]:
        raise _problem(file, "lacks its tokens")
    return entry


def _read_tokens(file: Path, entries: dict[str, TensorEntry], model: Decoder) -> list[int]:
    ((_, array),) = read_tensors(file, [_tokens_entry(file, entries)])
    tokens = cast(list[int], array.tolist())
    try:
        check_tokens(tokens, model.vocab_size)
    except ValueError as error:
        raise _problem(file, "has tokens outside the vocabulary") from error
    return tokens


def _check_entries(
    file: Path, entries: dict[str, TensorEntry], expected: dict[str, mx.array]
) -> None:
    names = {_TOKENS, *(_STATE + path for path in expected)}
    if entries.keys() != names:
        different = sorted(entries.keys() ^ names)[0]
        raise _problem(file, f"lacks {different!r:.60}, or has it where the model has none")
    for path, array in expected.items():
        entry = entries[_STATE + path]
        if entry.shape != array.shape or entry.dtype != array.dtype:
            raise _problem(
                file,
                f"has {entry.dtype} {entry.shape} for {entry.name!r} where the model has "
                f"{array.dtype} {array.shape}",
            )


def _problem(file: Path, text: str) -> CheckpointError:
    return CheckpointError(
        f"[prompt cache] '{file}' {text}. Use the settings for keys and values that it was made with, "
        "or cache the prompt again."
    )
