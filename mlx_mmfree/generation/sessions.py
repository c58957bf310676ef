"""The states of a model, found by the tokens that led to them.

They are kept as bytes, which no decoding can write to and any thread may read. A state is many small
arrays, and a GPU's memory is handed out in pages of 16 KB: as one piece it takes what it holds.
"""

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ..errors import MMFreeError
from ..models import Decoder
from . import session_store, states
from .prompt_cache import load_prompt_cache


def pack(model: Decoder, state: Any, count: int) -> bytes | None:
    """The arrays of a state, one after the other.

    Args:
        model: The model that made it.
        state: In the ordinary form.
        count: How many tokens it has read.

    Returns:
        The bytes; `None` if they are worth nothing: a number is NaN or infinite, or longer rows beside
        this one have made it what it would not be alone.

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
    return _joined(trimmed)


def can_be_packed(model: Decoder, data: bytes, count: int) -> bool:
    """Whether `pack` can give these bytes: their numbers are finite, and the positions right."""
    trimmed = states.trimmed_state(model, unpack(model, data, count), count)
    return trimmed is not None and _joined(trimmed) == data


def _joined(state: tuple[Any, ...]) -> bytes | None:
    arrays = list(states.arrays_by_place(state).values())
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    finite = mx.stack([mx.array(True), *(mx.all(mx.abs(array) < mx.inf) for array in floats)]).all()
    pieces = [mx.contiguous(array).reshape(-1).view(mx.uint8) for array in arrays]
    mx.eval(finite, pieces)
    return b"".join(np.asarray(piece).data for piece in pieces) if finite.item() else None


def unpack(model: Decoder, data: bytes, count: int) -> tuple[Any, ...]:
    """The state that `pack` was given, in memory of its own."""
    position = 0

    def taken(want: mx.array) -> mx.array:
        nonlocal position
        words = np.frombuffer(data, f"u{want.dtype.size}", want.size, position)
        position += want.nbytes
        array = mx.array(words.reshape(want.shape))
        return array != 0 if want.dtype == mx.bool_ else array.view(want.dtype)

    state: tuple[Any, ...] = tree_map(taken, states.blank_state(model, 1, count))
    return state


DISK_BYTES = 10 * 10**9


@dataclass(frozen=True)
class Known:
    """What is known of a text.

    Attributes:
        count: How many of its first tokens were read before; 0 if nothing is known.
        state: The model's state after them, as a batch of one row; `None` is that of an empty text.
    """

    count: int
    state: tuple[Any, ...] | None


@dataclass(frozen=True)
class SessionStats(session_store.StoredSessions):
    """What sessions take and what they save.

    Attributes:
        hits: Texts of which a beginning was known.
        misses: Texts of which nothing was known.
        tokens_saved: Tokens of all texts that were not read again.
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
    one state: it is kept once, and whoever finds it gets memory of its own. In memory, the state of
    attention after a text takes the place of those after beginnings of it that were kept before, where
    it can be cut to them. The states that were used longest ago go first, in memory as on the disk.

    With a folder, each state is also written to a file, by a thread of its own: `keep` returns at once.
    Files appear whole or not at all, and outlive the process once `is_on_disk` says so; a damaged one
    is removed with a warning. Several processes may share the folder, and each finds what there was
    when it started and what it has kept itself. All calls but `stats` come from one thread at a time.

    The texts of all who use one server are found alike, and the time that an answer takes tells whether
    somebody has sent its beginning before: sessions are made for one user, not for strangers who share
    a server. Files hold the texts, as token ids, for whoever may read the folder.

    Args:
        model: The model, with its adapter.
        memory_bytes: Bytes of memory at most.
        folder: Where sessions outlive the process; `None`: nowhere. A folder that is missing is made,
            for its owner alone.
        disk_bytes: Bytes of all files of the folder at most.

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
        model: Decoder,
        *,
        memory_bytes: int,
        folder: str | os.PathLike[str] | None = None,
        disk_bytes: int = DISK_BYTES,
    ):
        for name, size in (("memory_bytes", memory_bytes), ("disk_bytes", disk_bytes)):
            if size < 0:
                raise ValueError(f"[Sessions] '{name}' must not be negative but got {size}.")
        self._model = model
        self._identity = session_store.identity_of(model)
        self._can_rewind = states.can_rewind(model, 1, 1)
        files = None if folder is None else session_store.SessionFolder(folder)
        self._store = session_store.SessionStore(memory_bytes, files, disk_bytes)
        self._counts = _Counts()

    def for_model(self, model: Decoder) -> "Sessions":
        """Sessions of another model or adapter within the same limits, counted together."""
        other = copy(self)
        other._model = model
        other._identity = session_store.identity_of(model)
        other._can_rewind = states.can_rewind(model, 1, 1)
        return other

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
        """The longest beginning of a text, shorter than the text, whose state is kept.

        Args:
            tokens: The text. Its last token is never known, since the logits after it are asked for.

        Raises:
            ValueError: A token is outside the vocabulary.
        """
        text = session_store.token_bytes(tokens, self._model.vocab_size)
        lengths = sorted(length for length in self._store.lengths() if length < len(tokens))
        for key in reversed(list(session_store.keys_of_beginnings(self._identity, text, lengths))):
            state = self._state(key, text)
            if state is not None:
                self._counts.hits += 1
                self._counts.tokens_saved += key.length
                return Known(key.length, state)
        self._counts.misses += 1
        return Known(0, None)

    def keep(self, tokens: Sequence[int], state: Any) -> None:
        """Keeps the state after a text.

        It is copied before this returns. One that is worth nothing is not kept: it holds NaN or
        infinity, or is quantised too early because of longer rows beside it.

        Args:
            tokens: All tokens that the model has read, one at least.
            state: Its state after them, as one row in the ordinary form.

        Raises:
            ValueError: A token is outside the vocabulary, or the state is not one after so many tokens.
            RuntimeError: The sessions are closed.
        """
        if not len(tokens):
            raise ValueError("[Sessions] 'tokens' must hold at least one id but are empty.")
        text = session_store.token_bytes(tokens, self._model.vocab_size)
        key = session_store.key_of(self._identity, text)
        found = self._store.recall(key)
        if found is None:
            packed = pack(self._model, state, key.length)
            if packed is None:
                return
            self._store.remember(key, packed, self._served_beginnings(key, text))
        else:
            holder, packed = found
            if holder != key:
                return
        if not self._store.has_folder:
            return
        if self._store.is_on_disk(key):
            self._store.touch(key)
        else:
            content = session_store.content_of(self._model, self._identity, text)
            self._store.write(key, content, packed)

    def preload(self, path: str | os.PathLike[str]) -> int:
        """Keeps what a file of `save_prompt_cache` holds, and returns how many tokens that are.

        Raises:
            CheckpointError: The file is missing or damaged, or another model made it.
            MMFreeError: Memory has no room for it, and there is no folder.
        """
        cache = load_prompt_cache(path, self._model)
        self.keep(cache.tokens, cache.state)
        key = session_store.key_of(
            self._identity, session_store.token_bytes(cache.tokens, self._model.vocab_size)
        )
        if not self._store.has_folder and self._store.recall(key) is None:
            raise MMFreeError(
                f"[Sessions] 'memory_bytes' must be more than {cache.nbytes:,}, which '{path}' takes. "
                "Raise the limit."
            )
        return len(cache.tokens)

    def is_on_disk(self, tokens: Sequence[int]) -> bool:
        """Whether the state after a text is written: it is found again even if the process is killed."""
        text = session_store.token_bytes(tokens, self._model.vocab_size)
        return self._store.is_on_disk(session_store.key_of(self._identity, text))

    def flush(self) -> None:
        """Waits until all that was kept is on the disk, save what `stats` counts as lost."""
        self._store.flush()

    def close(self) -> None:
        """Writes what is still to be written. Nothing may be kept after it."""
        self._store.close()

    def stats(self) -> SessionStats:
        """What there is now; any thread may ask."""
        return SessionStats(**vars(self._store.stored()), **vars(self._counts))

    def _state(self, key: session_store.TextKey, text: bytes) -> tuple[Any, ...] | None:
        """The state after a beginning of a text, from memory or from the disk."""
        found = self._store.recall(key)
        if found is None and self._store.is_on_disk(key):
            found = self._read(key, text[: key.length * session_store.BYTES_PER_TOKEN])
        if found is None:
            return None
        if self._store.has_folder:
            self._store.touch(key)
        holder, packed = found
        state = unpack(self._model, packed, holder.length)
        if holder == key:
            return state
        return states.rewound_state(self._model, state, holder.length - key.length)

    def _served_beginnings(
        self, key: session_store.TextKey, text: bytes
    ) -> list[session_store.TextKey]:
        """The beginnings in memory whose states can be had from that of the whole text."""
        if not self._can_rewind:
            return []
        lengths = sorted(length for length in self._store.lengths() if length < key.length)
        beginnings = session_store.keys_of_beginnings(self._identity, text, lengths)
        return [
            each
            for each in self._store.in_memory(beginnings)
            if states.can_rewind(self._model, each.length, key.length - each.length)
        ]

    def _read(
        self, key: session_store.TextKey, text: bytes
    ) -> tuple[session_store.TextKey, bytes] | None:
        try:
            state = self._store.read(
                key, session_store.content_of(self._model, self._identity, text)
            )
            if not can_be_packed(self._model, state, key.length):
                raise ValueError("holds numbers that no state has")
        except FileNotFoundError:
            # another process has removed it
            self._store.drop(key)
        except (OSError, ValueError) as error:
            self._store.drop(key, str(error))
        else:
            self._store.remember(key, state)
            return key, state
        return None
