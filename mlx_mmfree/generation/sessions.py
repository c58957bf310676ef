"""The states of a model, found by the tokens that led to them.

They are kept as bytes, which no decoding can write to and any thread may read.
"""

import os
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ..errors import MMFreeError
from ..models import Decoder
from . import states
from .prompt_cache import load_prompt_cache
from .storage.keys import BYTES_PER_TOKEN, TextKey, key_of, token_bytes
from .storage.session_file import content_of, identity_of
from .storage.session_folder import SessionFolder
from .storage.session_store import SessionStore, StoredSessions

_INFINITY = {mx.float32: 0x7F800000, mx.bfloat16: 0x7F80, mx.float16: 0x7C00}
"""The bits of infinity, by float types."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """An array as bytes.

    Attributes:
        data: Its numbers, row after row.
        dtype: Their type.
        shape: Its shape.
    """

    data: bytes | memoryview
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: mx.array) -> "Chunk":
        """The chunk of an array which is computed."""
        return cls(memoryview(cast(Any, array)).tobytes(), array.dtype, array.shape)

    @property
    def is_finite(self) -> bool:
        """True if no number is NaN or infinite."""
        infinity, size = _INFINITY.get(self.dtype), self.dtype.size
        if infinity is None or not self.data:
            return True
        # bits are ordered as magnitudes are: the largest without a sign is positive, with one negative
        positive = np.frombuffer(self.data, f"i{size}").max()
        negative = np.frombuffer(self.data, f"u{size}").max()
        return bool(positive < infinity and negative < infinity + (1 << (8 * size - 1)))

    def array(self, slots: int | None = None) -> mx.array:
        """The array in memory of its own, with so many slots on axis 2, of which new ones are zeros."""
        words = np.frombuffer(self.data, f"u{self.dtype.size}").reshape(self.shape)
        if slots is None:
            array = mx.array(words)
        else:
            batch, heads, used, dims = self.shape
            # without an operation of MLX, which would wait for those that are under way
            array = mx.array(np.zeros((batch, heads, slots, dims), words.dtype))
            np.array(array, copy=False)[:, :, :used] = words[:, :, :slots]
        return array != 0 if self.dtype == mx.bool_ else array.view(self.dtype)


_CHUNK_BYTES = 300
"""About what a chunk takes beside its data (measured)."""


def pack(model: Decoder, state: Any, count: int) -> Any | None:
    """The state with a `Chunk` in the place of each array.

    Args:
        model: The model that made it.
        state: In the ordinary variant.
        count: How many tokens it has read.

    Returns:
        The packed state; `None` if it is worth nothing: a number is NaN or infinite, or longer rows
        beside this one have made it what it would not be alone.

    Raises:
        ValueError: The state is not one that the model has after so many tokens of one row.
    """
    if states.is_of_batch(model, state, count):
        return None
    trimmed = states.trimmed_state(model, state, count)
    if trimmed is None:
        raise ValueError(
            f"[Sessions] 'state' must be the state that the model has after its {count} tokens, as one "
            "row without padding, but is another."
        )
    return _packed(trimmed)


def can_be_packed(model: Decoder, packed: Any, count: int) -> bool:
    """Returns whether `pack` can give this state: its numbers are finite, and the positions right."""
    trimmed = states.trimmed_state(model, unpack(model, packed), count)
    return trimmed is not None and _packed(trimmed) == packed


def _packed(state: tuple[Any, ...]) -> Any | None:
    mx.eval(state)
    packed = tree_map(Chunk.of, state)
    return packed if all(chunk.is_finite for chunk in _chunks(packed)) else None


def _chunks(packed: Any) -> list[Chunk]:
    return cast(list[Chunk], list(states.arrays_by_path(packed).values()))


def unpack(model: Decoder, packed: Any, after: int = 0) -> tuple[Any, ...]:
    """The state that `pack` was given, in memory of its own with capacity for more tokens.

    Args:
        model: The model that made it.
        packed: The packed state.
        after: How many of its last tokens are taken back, where `can_rewind` promised it.
    """
    pairs = [
        (mixer.state_kind, part) for mixer, part in zip(model.token_mixers, packed, strict=True)
    ]
    state = [kind.unpacked(part, Chunk.array, after) for kind, part in pairs]
    if after:
        state = [kind.rewound(part, after) for (kind, _), part in zip(pairs, state, strict=True)]
    return tuple(state)


def _packed_of(model: Decoder, data: bytes, count: int) -> Any:
    """The packed state whose chunks a file holds, one after the other."""
    position, view = 0, memoryview(data)

    def taken(want: mx.array) -> Chunk:
        nonlocal position
        position += want.nbytes
        return Chunk(view[position - want.nbytes : position], want.dtype, want.shape)

    return tree_map(taken, states.blank_state(model, 1, count))


DISK_BYTES = 10 * 10**9
_ANY_LENGTH = 2**31
"""More tokens than a text has."""


@dataclass(frozen=True)
class Known:
    """The entry of a text.

    Attributes:
        count: How many of its first tokens were read before; 0 if nothing is known.
        state: The model's state after them, as a batch of one row; `None` is an empty text's.
    """

    count: int
    state: tuple[Any, ...] | None


@dataclass(frozen=True)
class SessionStats(StoredSessions):
    """The memory that sessions take and the work that they save.

    Attributes:
        hits: Texts of which a prefix was cached.
        misses: Texts of which nothing was cached.
        tokens_saved: Tokens of all texts that were already cached.
    """

    hits: int
    misses: int
    tokens_saved: int


@dataclass
class _Counts:
    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0


class Sessions:
    """States of a model under the tokens that led to them, so that no text is read twice.

    But for rounding, a state found goes on as if the text had just been read. Many texts may go on from
    one state: it is stored once, and whoever finds it gets memory of its own. In memory, the state of
    attention after a text replaces the states after its prefixes that were stored before, where it can
    be cut to them. The states that were used longest ago are evicted first, in memory as on the disk.

    With a folder, each state is also written to a file, by a thread of its own: `keep` returns at once.
    Files appear whole or not at all, and outlive the process once `is_on_disk` says so; a damaged one
    is removed with a warning. Several processes may share the folder, and each finds what there was
    when it started and what it has stored itself. All calls but `stats` come from one thread at a time.

    The texts of all who use one server are found alike, and the time that an answer takes tells whether
    somebody has sent its prefix before: sessions are made for one user, not for strangers who share
    a server. Files hold the texts, as token ids, for whoever may read the folder.

    Args:
        model: The model, with its adapter; `None` where only models of `for_model` are used.
        memory_bytes: Bytes of memory at most.
        folder: Where sessions outlive the process; `None`: nowhere. A folder that is missing is made,
            for its owner alone.
        disk_bytes: Bytes of all files of the folder at most.

    Attributes:
        serves_all: The state after a text can be cut to any prefix of it, and there is no folder, so
            that a prefix need not be stored before the whole text is.

    Raises:
        ValueError: A limit is negative.
        CheckpointError: The folder cannot be made or written to.

    Example:
        >>> sessions = Sessions(model, memory_bytes=2**30)  # doctest: +SKIP
        >>> sessions.keep(tokens, prefill(model, mx.array([tokens])))  # doctest: +SKIP
        >>> known = sessions.find([*tokens, 5, 7])  # doctest: +SKIP
        >>> rest = [*tokens, 5, 7][known.count :]  # doctest: +SKIP
        >>> list(generate_tokens(model, rest, state=known.state))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Decoder | None,
        *,
        memory_bytes: int,
        folder: str | os.PathLike[str] | None = None,
        disk_bytes: int = DISK_BYTES,
    ):
        for name, size in (("memory_bytes", memory_bytes), ("disk_bytes", disk_bytes)):
            if size < 0:
                raise ValueError(f"[Sessions] '{name}' must not be negative but got {size}.")
        files = None if folder is None else SessionFolder(folder)
        self._store = SessionStore(memory_bytes, files, disk_bytes)
        self._counts = _Counts()
        if model is not None:
            self._take(model)

    def for_model(self, model: Decoder) -> "Sessions":
        """Sessions of another model or adapter within the same limits, counted together."""
        other = copy(self)
        other._take(model)
        return other

    def _take(self, model: Decoder) -> None:
        self._model = model
        self._identity = identity_of(model)
        self._can_rewind = states.can_rewind(model, 1, 1)
        self.serves_all = not self._store.has_folder and states.can_rewind(model, 1, _ANY_LENGTH)

    def __enter__(self) -> "Sessions":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def find(self, tokens: Sequence[int]) -> Known:
        """The longest prefix of a text, shorter than the text, whose state is kept.

        Args:
            tokens: The text. Its last token is never known, since the logits after it are asked for.

        Raises:
            ValueError: A token is outside the vocabulary.
        """
        text = token_bytes(tokens, self._model.vocab_size)
        for key in reversed(self._store.prefixes(self._identity, text, below=len(tokens))):
            found = self._store.recall(key)
            if found is None and self._store.is_on_disk(key):
                found = self._read(key, text[: key.length * BYTES_PER_TOKEN])
            if found is None:
                continue
            if self._store.has_folder:
                self._store.touch(key)
            holder, packed = found
            state = unpack(self._model, packed, holder.length - key.length)
            self._counts.hits += 1
            self._counts.tokens_saved += key.length
            return Known(key.length, state)
        self._counts.misses += 1
        return Known(0, None)

    def keep(self, tokens: Sequence[int], state: Any, prefixes: Collection[int] = ()) -> None:
        """Keeps the state after a text.

        It is copied before this returns. One that is worth nothing is not kept: it holds NaN or
        infinity, or is quantised too early because of longer rows beside it.

        Args:
            tokens: All tokens that the model has read, one at least.
            state: Its state after them, as one row in the ordinary variant.
            prefixes: Lengths of prefixes that shall be found too, if `serves_all`.

        Raises:
            ValueError: A token is outside the vocabulary, or the state is not one after so many tokens.
            RuntimeError: The sessions are closed.
        """
        if not len(tokens):
            raise ValueError("[Sessions] 'tokens' must hold at least one id but are empty.")
        text = token_bytes(tokens, self._model.vocab_size)
        key = key_of(self._identity, text)
        found = self._store.recall(key)
        if found is None:
            packed = pack(self._model, state, key.length)
            if packed is None:
                return
            self._remember(key, packed, self._served_prefixes(key, text))
        else:
            key, packed = found
        if self.serves_all:
            # nothing is known of an empty text
            sizes = (length * BYTES_PER_TOKEN for length in prefixes if length)
            parts = (text[:size] for size in sizes)
            self._store.serve(key, [key_of(self._identity, part) for part in parts])
        if not self._store.has_folder or key.length > len(tokens):
            return
        if self._store.is_on_disk(key):
            self._store.touch(key)
        else:
            content = content_of(self._model, self._identity, text)
            self._store.write(key, content, [chunk.data for chunk in _chunks(packed)])

    def _remember(
        self,
        key: TextKey,
        packed: Any,
        prefixes: Sequence[TextKey] = (),
    ) -> None:
        nbytes = sum(len(chunk.data) + _CHUNK_BYTES for chunk in _chunks(packed))
        self._store.remember(key, packed, nbytes, prefixes)

    def preload(self, path: str | os.PathLike[str]) -> int:
        """Keeps what a file of `save_prompt_cache` holds, and returns how many tokens that are.

        Raises:
            CheckpointError: The file is missing or damaged, or another model made it.
            MMFreeError: Memory has no space for it, and there is no folder.
        """
        cache = load_prompt_cache(path, self._model)
        self.keep(cache.tokens, cache.state)
        key = key_of(self._identity, token_bytes(cache.tokens, self._model.vocab_size))
        if not self._store.has_folder and self._store.recall(key) is None:
            raise MMFreeError(
                f"[Sessions] 'memory_bytes' must be more than {cache.nbytes:,}, which '{path}' takes. "
                "Raise the limit."
            )
        return len(cache.tokens)

    def is_on_disk(self, tokens: Sequence[int]) -> bool:
        """Returns whether the state after a text is written, and outlives even a killed process."""
        text = token_bytes(tokens, self._model.vocab_size)
        return self._store.is_on_disk(key_of(self._identity, text))

    def flush(self) -> None:
        """Waits until all stored states are on the disk, except the ones that `stats` counts as lost."""
        self._store.flush()

    def close(self) -> None:
        """Writes what is still to be written. Nothing may be kept after it."""
        self._store.close()

    def stats(self) -> SessionStats:
        """The metrics now; any thread may ask."""
        return SessionStats(**vars(self._store.stored()), **vars(self._counts))

    def _served_prefixes(self, key: TextKey, text: bytes) -> list[TextKey]:
        """The prefixes in memory whose states can be had from the whole text's."""
        if not self._can_rewind:
            return []
        prefixes = self._store.prefixes(self._identity, text, below=key.length)
        return [
            each
            for each in self._store.in_memory(prefixes)
            if states.can_rewind(self._model, each.length, key.length - each.length)
        ]

    def _read(self, key: TextKey, text: bytes) -> tuple[TextKey, Any] | None:
        try:
            data = self._store.read(key, content_of(self._model, self._identity, text))
            packed = _packed_of(self._model, data, key.length)
            if not can_be_packed(self._model, packed, key.length):
                raise ValueError("holds numbers that no state has")
        except FileNotFoundError:
            # another process has removed it
            self._store.drop(key)
        except (OSError, ValueError) as error:
            self._store.drop(key, str(error))
        else:
            self._remember(key, packed)
            return key, packed
        return None
