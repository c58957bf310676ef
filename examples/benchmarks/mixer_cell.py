"""One mixer at one length or size, measured in a process of its own: its time, its memory, its limits.

A recurrence whose state is a matrix is compared with a product of float32 matrices, and one between
vectors with a copy of memory. On a CPU, times are processor times, of all threads together: other
programs change them less than the clock's.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from math import isqrt
from threading import Event, Thread
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mmfree.evaluation.benchmark import Record, computing_threads, in_turn, nested_arrays
from mlx_mmfree.layers.mixer import State, TokenMixer
from mlx_mmfree.models.parts.mixers import find_spatial_mixer, token_mixers
from mlx_mmfree.ops.backend.dispatch import Operation, on_cpu, operations, recorded_calls
from mlx_mmfree.ops.kernel_times import total_bytes
from mlx_mmfree.platform.allocator import keep_freed_memory, return_freed_memory
from mlx_mmfree.platform.memory_reader import queued_seconds
from mlx_mmfree.platform.resident_memory import forget_peak, peak_resident_bytes, resident_memory

BLAS, COPY = "float32 products", "copy"
"""Limits: products of float32 matrices, and copying as many bytes."""

FORWARD, BACKWARD, DECODING = "forward", "forward and backward", "decoding"
"""The measurements of a mixer."""

TOO_LARGE = "memory"
"""Why a measurement stopped: it needed more memory than it may take."""

DECODED_TOKENS = 16
_PART = 512
_WARM_UP = 16
_WATCH_SECONDS = 0.02


class Elapsed(NamedTuple):
    """How long something took.

    Attributes:
        seconds: By the clock.
        processor_seconds: Of all threads of this process, which other programs hardly change.
    """

    seconds: float
    processor_seconds: float


def elapsed_both(compute: Callable[[], object]) -> Elapsed:
    """The time that a function takes, by the clock and of the processors."""
    start = time.perf_counter(), time.process_time()
    compute()
    return Elapsed(time.perf_counter() - start[0], time.process_time() - start[1])


def measure_cell(
    mixer: str,
    work: str,
    length: int,
    dims: int,
    batch_size: int,
    rounds: int,
    memory_bytes: int,
    is_spatial: bool = False,
) -> dict[str, Any]:
    """Measures a mixer.

    Args:
        mixer: Its name.
        work: `FORWARD`, `BACKWARD` or `DECODING`.
        length: Number of positions of a sequence; for decoding, those before the tokens that are timed;
            for a spatial mixer, number of positions of a square map.
        dims: Model dims.
        batch_size: Number of sequences.
        rounds: Number of measurements, after one that does not count.
        memory_bytes: The most memory that it may take.
        is_spatial: Whether it is a spatial mixer.

    Returns:
        The `seconds` and `processor_seconds` of the fastest round, for decoding
        of a token, `peak_bytes`, the memory that was taken beside inputs and parameters, and of decoding
        `state_bytes`. Only `stopped`, if it did not fit.
    """
    keep_freed_memory()
    with _memory_limit(memory_bytes):
        if is_spatial:
            return _of_map(mixer, work, length, dims, batch_size, rounds)
        return _measured(mixer, work, length, dims, batch_size, rounds)


@contextmanager
def _memory_limit(memory_bytes: int) -> Iterator[None]:
    """Ends the process with a result that says so, once it takes more than this beside what it has.

    MLX on a CPU does not survive a failed allocation, so the limit is not left to the system.
    """
    done, limit = Event(), _used_bytes() + memory_bytes

    def watch() -> None:
        while not done.wait(_WATCH_SECONDS):
            if _used_bytes() > limit:
                print(json.dumps({"result": {"stopped": TOO_LARGE}}), flush=True)
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
    name: str, work: str, size: int, dims: int, batch_size: int, rounds: int
) -> dict[str, Any]:
    kind: Any = find_spatial_mixer(name)
    mixer = kind(dims)
    side, least = isqrt(size), isqrt(_WARM_UP)
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
    before = _bytes_before()
    times = [elapsed_both(lambda: compute(mixer, x)) for _ in range(rounds + 1)]
    return _fastest(times[1:], 1) | {"peak_bytes": max(0, _peak_bytes() - before)}


def _fastest(times: Sequence[Elapsed], count: int) -> dict[str, float]:
    """The least time of each kind for one of so many things."""
    return {name: min(getattr(t, name) for t in times) / count for name in Elapsed._fields}


def _mixed(mixer: nn.Module, x: mx.array) -> mx.array:
    """The output of a mixer, without the state of a token mixer."""
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
    """The seconds of a token, in rounds of several, after a text that was read in chunks."""
    state: State = mixer.init_state(x.shape[0], x.dtype)
    for start in range(0, length, _PART):
        state = mixer(x[:, start : min(start + _PART, length)], state)[1]
        mx.eval(state)
    state_bytes = total_bytes(nested_arrays(state))
    token = mx.contiguous(x[:, :1])
    mx.eval(token)
    before = _bytes_before()

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


def _bytes_before() -> int:
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
    memory = resident_memory()
    return peak_resident_bytes() if memory is None else memory.anonymous_bytes + memory.mapped_bytes


def _peak_bytes() -> int:
    return peak_resident_bytes() if on_cpu() else mx.get_peak_memory()


_BLAS_DIMS = 1024
_CHUNK = 64
_BATCHES = 5

Work = tuple[int, int]


def _matrix_work(q: mx.array, k: mx.array, v: mx.array, *_: Any) -> Work:
    """The multiplications that chunks of 64 positions need: reading from the state, adding to it, and
    the weights between a position and those up to it, times keys and times values."""
    positions, keys, values = q.size // q.shape[3], q.shape[3], v.shape[3]
    return positions * (2 * keys * values + (_CHUNK + 1) * (keys + values) // 2), 0


def _scan_work(f: mx.array, i: mx.array, *_: Any) -> Work:
    """Reading gates and inputs and writing states; gates that all positions share need not be read."""
    is_shared = bool((f == f[:, :1]).all())
    return 0, (2 if is_shared else 3) * i.size * 4


def _gates_work(gates: mx.array, *_: Any) -> Work:
    return 0, gates.nbytes // 3 * 4


_WORK: dict[str, Callable[..., Work]] = {
    "gated_linear_attention": _matrix_work,
    "linear_scan": _scan_work,
    "mlgru_step": _gates_work,
}
"""The work that each operation cannot avoid: its multiplications, or its bytes."""


def measure_rates(
    mixer: str, length: int, dims: int, batch_size: int, rounds: int
) -> list[dict[str, Any]]:
    """Measures the operations of a mixer with the arrays that it gives them, in turn with the limit.

    Args:
        mixer: Its name.
        length: Number of positions.
        dims: Model dims.
        batch_size: Number of sequences.
        rounds: Number of measurements.

    Returns:
        A record for each recurrence.
    """
    keep_freed_memory()
    made = build(mixer, dims, length)
    x = mx.random.normal((batch_size, length, dims))
    records = []
    for name, work in _WORK.items():
        operation = operations()[name]
        with recorded_calls(operation) as calls:
            mx.eval(made(x)[0])
        for args, kwargs in calls:
            mx.eval(nested_arrays([args, kwargs]))
            compute = _passes(operation, args, kwargs)
            record = _record(f"{mixer}: {name}", work(*args), compute, rounds)
            records.append(asdict(record))
    return records


def _passes(operation: Operation, args: Any, kwargs: Any) -> Callable[[], list[mx.array]]:
    def compute() -> list[mx.array]:
        return nested_arrays(operation(*args, **kwargs))

    return compute


def _record(name: str, work: Work, compute: Callable[[], list[mx.array]], rounds: int) -> Record:
    macs, moved = work
    limit = _product(macs) if macs else _copy(moved)
    seconds = in_turn(rounds * _BATCHES, limit, lambda: _seconds(compute))
    return Record(
        name,
        threads=computing_threads(),
        limit=BLAS if macs else COPY,
        bytes=moved,
        macs=macs,
        **seconds,
    )


def _seconds(compute: Callable[[], list[mx.array]]) -> float:
    return _processor_seconds(lambda: mx.eval(compute())) if on_cpu() else queued_seconds(compute)


def _processor_seconds(compute: Callable[[], object]) -> float:
    return elapsed_both(compute).processor_seconds


def _product(macs: int) -> Callable[[], float]:
    """Tells how long a large product takes, for each of so many multiplications."""
    a, b = mx.random.normal((2, _BLAS_DIMS, _BLAS_DIMS))
    mx.eval(a, b)
    return lambda: _seconds(lambda: [a @ b]) * macs / _BLAS_DIMS**3


def _copy(moved: int) -> Callable[[], float]:
    """Tells how long copying takes that reads and writes so many bytes together."""
    if not on_cpu():
        source = mx.zeros((moved // 8,))
        return lambda: queued_seconds(lambda: [source + 1.0])
    count = computing_threads()
    sources = np.array_split(np.ones(moved // 8, np.float32), count)
    targets = np.array_split(np.zeros(moved // 8, np.float32), count)
    pool = ThreadPoolExecutor(count)
    return lambda: _processor_seconds(lambda: list(pool.map(np.copyto, targets, sources)))
