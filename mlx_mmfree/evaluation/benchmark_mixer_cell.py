"""One mixer at one length or size: its time and its memory, measured in a process of its own."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isqrt
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..layers.mixer import State, TokenMixer
from ..models.parts.mixers import find_spatial_mixer, token_mixers
from ..ops.backend.dispatch import on_cpu
from ..platform.allocator import keep_freed_memory, return_freed_memory
from ..platform.resident_memory import forget_peak, peak_resident_bytes, resident_memory
from .benchmark_record import Record
from .benchmark_rounds import Elapsed, elapsed_both

FORWARD, BACKWARD, DECODING = "forward", "forward and backward", "decoding"
"""What is measured of a mixer."""

TOO_LARGE = "memory"
"""Why a measurement stopped: it needed more memory than it may take."""

DECODED_TOKENS = 16
_PIECE = 512
_WARM_UP = 16
_WATCH_SECONDS = 0.02


def run(
    mixer: str,
    work: str,
    length: int,
    dims: int,
    batch_size: int,
    rounds: int,
    memory_bytes: int,
    is_spatial: bool = False,
) -> tuple[list[Record], dict[str, Any]]:
    """Measures a mixer.

    Args:
        mixer: Its name.
        work: `FORWARD`, `BACKWARD` or `DECODING`.
        length: Number of positions of a sequence; for decoding, those before the tokens that are timed;
            for a spatial mixer, number of places of a square map.
        dims: Model dims.
        batch_size: Number of sequences.
        rounds: Number of measurements, after one that does not count.
        memory_bytes: The most memory that it may take.
        is_spatial: Whether it is a spatial mixer.

    Returns:
        No records; and as notes the `seconds` and `processor_seconds` of the fastest round, for decoding
        of a token, `peak_bytes`, the memory that was taken beside inputs and parameters, and of decoding
        `state_bytes`. Only `stopped`, if it did not fit.
    """
    keep_freed_memory()
    with _memory_limit(memory_bytes):
        if is_spatial:
            return [], _of_map(mixer, work, length, dims, batch_size, rounds)
        return [], _measured(mixer, work, length, dims, batch_size, rounds)


@contextmanager
def _memory_limit(memory_bytes: int) -> Iterator[None]:
    """Ends the process with a result that says so, once it takes more than this beside what it has.

    MLX on a CPU does not survive a failed allocation, so the limit is not left to the system.
    """
    done, limit = Event(), _used_bytes() + memory_bytes

    def watch() -> None:
        while not done.wait(_WATCH_SECONDS):
            if _used_bytes() > limit:
                print(json.dumps({"records": [], "notes": {"stopped": TOO_LARGE}}), flush=True)
                os._exit(0)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def build(mixer: str, dims: int, length: int) -> TokenMixer:
    """A mixer with its default options, for sequences of this length."""
    kind: Any = token_mixers()[mixer]
    bound = {"max_length": length} if kind.length_bound else {}
    made: TokenMixer = kind(dims, **bound)
    mx.eval(made.parameters())
    return made


def _measured(
    name: str, work: str, length: int, dims: int, batch_size: int, rounds: int
) -> dict[str, Any]:
    more = DECODED_TOKENS * (rounds + 1) if work == DECODING else 0
    mixer = build(name, dims, max(length + more, _WARM_UP))
    x = mx.random.normal((batch_size, max(length, _WARM_UP), dims))
    mx.eval(x)
    if work == DECODING:
        return _decoded(mixer, x, length, rounds)
    return _timed(mixer, work, x[:, :length], x[:, :_WARM_UP], rounds)


def _of_map(
    name: str, work: str, places: int, dims: int, batch_size: int, rounds: int
) -> dict[str, Any]:
    kind: Any = find_spatial_mixer(name)
    mixer = kind(dims)
    side, least = isqrt(places), isqrt(_WARM_UP)
    x, small = (mx.random.normal((batch_size, n, n, dims)) for n in (side, least))
    mx.eval(mixer.parameters(), x, small)
    return _timed(mixer, work, x, small, rounds)


def _timed(
    mixer: nn.Module, work: str, x: mx.array, small: mx.array, rounds: int
) -> dict[str, Any]:
    """The time and the memory of an input, after one of a small input that does not count."""
    compute = _forward if work == FORWARD else _backward
    # what is loaded or started at a first use is not part of a length's memory
    compute(mixer, small)
    before = _held_bytes()
    times = [elapsed_both(lambda: compute(mixer, x)) for _ in range(rounds + 1)]
    return _fastest(times[1:], 1) | {"peak_bytes": max(0, _peak_bytes() - before)}


def _fastest(times: Sequence[Elapsed], count: int) -> dict[str, float]:
    """The least time of each kind for one of so many things."""
    return {name: min(getattr(t, name) for t in times) / count for name in Elapsed._fields}


def _mixed(mixer: nn.Module, x: mx.array) -> mx.array:
    """What a mixer gives, without the state of a token mixer."""
    y = mixer(x)
    mixed: mx.array = y[0] if isinstance(y, tuple) else y
    return mixed


def _forward(mixer: nn.Module, x: mx.array) -> None:
    mx.eval(_mixed(mixer, x))


def _backward(mixer: nn.Module, x: mx.array) -> None:
    def loss(given: dict[str, Any]) -> mx.array:
        mixer.update(given["parameters"])
        return _mixed(mixer, given["x"]).astype(mx.float32).square().mean()

    mx.eval(mx.value_and_grad(loss)({"parameters": mixer.trainable_parameters(), "x": x}))


def _decoded(mixer: TokenMixer, x: mx.array, length: int, rounds: int) -> dict[str, Any]:
    """The seconds of a token, in rounds of several, behind a text that was read in pieces."""
    state: State = mixer.init_state(x.shape[0], x.dtype)
    for start in range(0, length, _PIECE):
        state = mixer(x[:, start : min(start + _PIECE, length)], state)[1]
        mx.eval(state)
    state_bytes = sum(array.nbytes for array in arrays_of(state))
    token = mx.contiguous(x[:, :1])
    mx.eval(token)
    before = _held_bytes()

    def decode() -> None:
        nonlocal state
        for _ in range(DECODED_TOKENS):
            y, state = mixer(token, state)
            mx.eval(y, state)

    times = [elapsed_both(decode) for _ in range(rounds + 1)]
    return _fastest(times[1:], DECODED_TOKENS) | {
        "peak_bytes": max(0, _peak_bytes() - before),
        "state_bytes": state_bytes,
    }


def arrays_of(values: Any) -> list[mx.array]:
    """The arrays among nested values."""
    flat: Any = tree_flatten(values)
    return [value for _, value in flat if isinstance(value, mx.array)]


def _held_bytes() -> int:
    """The memory in use before what is measured; forgets the peak until then where it can."""
    # what was freed would serve what is measured and so hide its memory
    mx.clear_cache()
    return_freed_memory()
    if not on_cpu():
        mx.reset_peak_memory()
    forget_peak()
    return _used_bytes()


def _used_bytes() -> int:
    """The memory in use; on a CPU where the system does not tell it, the most until now."""
    if not on_cpu():
        return mx.get_active_memory()
    held = resident_memory()
    return peak_resident_bytes() if held is None else held.anonymous_bytes + held.mapped_bytes


def _peak_bytes() -> int:
    return peak_resident_bytes() if on_cpu() else mx.get_peak_memory()
