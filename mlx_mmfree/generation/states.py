"""States of a model: what attention keeps of a text, the formats that it takes, and as it is stored."""

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from itertools import zip_longest
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..layers.quantization import Quantization
from ..models import Decoder

DEFAULT_GROUP_SIZES = (64, 32)


def keeps_key_values(model: Decoder) -> bool:
    """Tells whether a model has attention, whose state grows with the text.

    Args:
        model: The model.

    Returns:
        Whether a token mixer keeps keys and values.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> keeps_key_values(model)
        False
    """
    return any(mixer.key_value_dims is not None for mixer in model.token_mixers)


def with_key_values(
    model: Decoder,
    *,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int = 0,
) -> Decoder:
    """The same model, with the same weights, whose attention caches less of a text.

    Everything that runs a model takes the result instead of it. A state belongs to the settings it was
    made with. Token mixers without keys and values stay as they are.

    Args:
        model: It is not changed.
        max_kv_size: Tokens to keep at most: the first 4, which stay in view as the nearest of the
            rest would (StreamingLLM, arXiv 2309.17453), and the last ones.
        kv_bits: Bits of each number kept: 2, 3, 4, 5, 6 or 8; `None` keeps the floats.
        kv_group_size: Numbers that share a scale and a bias: 32, 64 or 128. Default: 64, or 32 where
            64 does not divide the dims of a head.
        quantized_kv_start: The state stays exact until it holds more tokens, padding counted, or is
            full.

    Returns:
        A model that shares its weights with the given one.

    Raises:
        ValueError: A value is out of its bounds, or no group size fits the heads.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> small = with_key_values(model, max_kv_size=1024, kv_bits=8)
        >>> generate(small, tokenizer, "Once upon a time", max_tokens=4)
        ', there was a'
    """
    changed = copy(model)
    changed.blocks = [copy(block) for block in model.blocks]
    for block in changed.blocks:
        dims = block.token_mixer.key_value_dims
        if dims is not None:
            block.token_mixer = block.token_mixer.with_state(
                max_size=max_kv_size,
                quantization=_quantization(dims, kv_bits, kv_group_size),
                quantization_start=quantized_kv_start,
            )
    return changed


def _quantization(dims: int, bits: int | None, group_size: int | None) -> Quantization | None:
    if bits is None:
        return None
    if group_size is None:
        fitting = (size for size in DEFAULT_GROUP_SIZES if dims % size == 0)
        group_size = next(fitting, DEFAULT_GROUP_SIZES[-1])
    return Quantization(bits, group_size)


def blank_state(model: Decoder, batch_size: int, length: int) -> tuple[Any, ...]:
    """A state of the shapes that `length` tokens leave; nothing is computed until it is asked for."""
    dtype = model.dtype
    return tuple(mixer.state_kind.blank(batch_size, length, dtype) for mixer in model.token_mixers)


def counted(model: Decoder, state: tuple[Any, ...]) -> list[mx.array]:
    """The arrays of a state that depend on the number of tokens alone."""
    return [
        array
        for mixer, each in zip(model.token_mixers, state, strict=True)
        for array in mixer.state_kind.counted(each)
    ]


def exact_lengths(model: Decoder) -> list[int]:
    """Numbers of tokens after which a part of the state is quantised, ascending."""
    found = {mixer.state_kind.exact_length for mixer in model.token_mixers}
    return sorted(length for length in found if length is not None)


def is_of_batch(model: Decoder, state: tuple[Any, ...], length: int) -> bool:
    """Returns whether a row of `length` tokens would have another state if it had been read alone."""
    return any(
        mixer.state_kind.is_of_batch(each, length)
        for mixer, each in zip(model.token_mixers, state, strict=False)
    )


def can_rewind(model: Decoder, length: int, count: int) -> bool:
    """Returns whether the state after `length` tokens can be had from that after `count` more."""
    pairs = zip(model.token_mixers, blank_state(model, 1, length), strict=True)
    return all(mixer.state_kind.can_rewind(each, count) for mixer, each in pairs)


def state_before(
    model: Decoder, state: tuple[Any, ...], length: int, count: int, stored: Sequence[Any] = ()
) -> tuple[Any, ...] | None:
    """The state of one row before its last `count` tokens.

    Args:
        model: The model that made it.
        state: In the ordinary variant, after `length` tokens.
        length: How many tokens the row has read.
        count: How many of them are taken back.
        stored: By mixers, the states at that position where they were stored, otherwise `None`.

    Returns:
        The state, or `None` where a mixer's was not stored and cannot be shortened.
    """
    found = []
    before = blank_state(model, 1, length - count)
    kinds = (mixer.state_kind for mixer in model.token_mixers)
    for kind, now, blank, own in zip_longest(kinds, state, before, stored):
        if kind.can_rewind(blank, count):
            found.append(kind.rewound(now, count))
        elif own is not None:
            found.append(own)
        else:
            return None
    return tuple(found)


def concatenated_states(model: Decoder, states: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The rows of several states in the ordinary variant, one after the other."""
    if len(states) == 1:
        return states[0]
    mixers = model.token_mixers
    return tuple(
        mixer.state_kind.merged(parts) for mixer, *parts in zip(mixers, *states, strict=True)
    )


def selected_rows(
    model: Decoder, state: tuple[Any, ...], rows: Sequence[int], length: int
) -> tuple[Any, ...]:
    """Some rows of a state in the ordinary variant, of which the longest has read `length` tokens."""
    index = mx.array(list(rows))
    return tuple(
        mixer.state_kind.selected(part, index, length)
        for mixer, part in zip(model.token_mixers, state, strict=True)
    )


def without_spare_slots(model: Decoder, state: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The state after `count` tokens of one row, in memory that has no space for more."""
    blank = blank_state(model, 1, count)
    parts: tuple[Any, ...] = tree_map(_first_part, state, blank)
    return cast(tuple[Any, ...], tree_map(mx.contiguous, parts))


def trimmed_state(model: Decoder, state: Any, count: int) -> tuple[Any, ...] | None:
    """The state of one row without the space after its tokens.

    Args:
        model: The model that made it.
        state: In the ordinary variant.
        count: How many tokens the model has read.

    Returns:
        The state, or `None` if it is not one that the model has after so many tokens of one row, read
        without padding.
    """
    blank = blank_state(model, 1, count)
    found, expected = arrays_by_path(state), arrays_by_path(blank)
    if found.keys() != expected.keys() or not all(
        _holds(found[path], array) for path, array in expected.items()
    ):
        return None
    trimmed = tree_map(_first_part, state, blank)
    own, expected_own = counted(model, trimmed), counted(model, blank)
    mx.eval(own, expected_own)
    is_same = all(
        memoryview(cast(Any, array)) == memoryview(cast(Any, want))
        for array, want in zip(own, expected_own, strict=True)
    )
    return trimmed if is_same else None


def arrays_by_path(tree: Any) -> dict[str, mx.array]:
    """Every array of a tree by its path."""
    return cast(dict[str, mx.array], dict(tree_flatten(tree)))


def _holds(array: mx.array, want: mx.array) -> bool:
    """Returns whether an array has one row, of the dtype and at least the size that are wanted."""
    return (
        array.dtype == want.dtype
        and array.ndim == want.ndim
        and array.shape[:1] == want.shape[:1]
        and all(have >= need for have, need in zip(array.shape, want.shape, strict=True))
    )


def _first_part(array: mx.array, want: mx.array) -> mx.array:
    """The first part of an array, of the wanted shape."""
    return array if array.shape == want.shape else array[tuple(map(slice, want.shape))]


_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def fingerprint(model: Decoder) -> str:
    """A digest of the architecture and of all weights; every bit is looked at.

    It tells models apart that differ by accident or training, not by intent.
    """
    parameters = sorted(arrays_by_path(model.parameters()).items(), key=lambda item: item[0])
    words = [array.reshape(-1).view(_WORDS[array.dtype.size]) for _, array in parameters]
    sums = cast(list[int], mx.stack([word.sum().astype(mx.uint32) for word in words]).tolist())
    config: dict[str, Any] = getattr(model.config, "to_hub", dict)()
    described = [
        [name, list(array.shape), str(array.dtype), total]
        for (name, array), total in zip(parameters, sums, strict=True)
    ]
    content = json.dumps([config, described], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
