"""How near the recurrence of a token mixer comes to the limits of the machine.

A recurrence whose state is a matrix is compared with a product of float32 matrices, and one between
vectors with a copy of memory. On a CPU, times are those of the processors, all threads together: other
programs change them less than the clock's.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops.backend.dispatch import dispatch, on_cpu, recorded_calls
from ..platform.allocator import keep_freed_memory
from ..platform.gpu_time import queued_seconds
from .benchmark_limits import computing_threads
from .benchmark_mixer_cell import arrays_of, build
from .benchmark_record import BLAS, COPY, Record
from .benchmark_rounds import elapsed_both, in_turn

_OPERATIONS = "mlx_mmfree.ops"
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
"""What each operation must compute and move: its multiplications, or its bytes."""


def run(
    mixer: str, length: int, dims: int, batch_size: int, rounds: int
) -> tuple[list[Record], dict[str, Any]]:
    """Measures the operations of a mixer with the arrays that it gives them, in turn with the limit.

    Args:
        mixer: Its name.
        length: Number of positions.
        dims: Model dims.
        batch_size: Number of sequences.
        rounds: Number of measurements.

    Returns:
        A record for each recurrence, and no notes.
    """
    keep_freed_memory()
    made = build(mixer, dims, length)
    x = mx.random.normal((batch_size, length, dims))
    records = []
    for name, work in _WORK.items():
        package = f"{_OPERATIONS}.{name}"
        with recorded_calls(package) as calls:
            mx.eval(made(x)[0])
        for args, kwargs in calls:
            mx.eval(arrays_of([args, kwargs]))
            compute = _passes(package, args, kwargs)
            records.append(_record(f"{mixer}: {name}", work(*args), compute, rounds))
    return records, {}


def _passes(package: str, args: Any, kwargs: Any) -> Callable[[], list[mx.array]]:
    def compute() -> list[mx.array]:
        return arrays_of(dispatch(package, *args, **kwargs))

    return compute


def _record(name: str, work: Work, compute: Callable[[], list[mx.array]], rounds: int) -> Record:
    macs, moved = work
    limit = _product(macs) if macs else _copy(moved)
    own, limits = in_turn(rounds * _BATCHES, limit, lambda: _seconds(compute))
    return Record(
        name,
        threads=computing_threads(),
        limit=BLAS if macs else COPY,
        bytes=moved,
        macs=macs,
        seconds=own,
        limit_seconds=limits,
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
