"""How fast a model reads prompts and decodes, beside what memory and arithmetic allow.

A measurement is made in several fresh processes, which have memory, threads and caches of their own. In
every round its limit is measured first, so that both meet the same state of the machine.
"""

import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import MeasurementError, MMFreeError
from ..files.plugins import LOADED, load_listed
from ..generation.decode import Decoding
from ..generation.reader import prefill
from ..hub import load_model, open_checkpoint
from ..layers.attention.key_values import KeyValueState
from ..layers.matrix import matrices
from ..models import Decoder, check_causal
from ..ops.device import on_cpu
from ..ops.inspection import multiply_rate
from ..ops.kernel_times import read_seconds, total_bytes
from ..platform.allocator import keep_freed_memory
from ..platform.memory_reader import MemoryReader, elapsed, memory_reader, queued_seconds
from ..platform.resident_memory import peak_resident_bytes
from ..platform.threads import thread_count

READ, MULTIPLY, HALF = "plain read", "8-bit arithmetic", "float16 products"
"""Limits: reading the same memory, the processor's arithmetic, and MLX's large products on a GPU."""

MODEL = "mlx_mmfree.evaluation.benchmark:measure_model"

_HALF_DIMS, _HALF_PRODUCTS, _MAX_MESSAGE = 2048, 8, 1000
_SHORT_MEMORY: dict[int, str] = {
    signal.SIGKILL: ", which the system sends when memory is short",
    signal.SIGSEGV: ", as MLX's processes on a CPU do when memory is short",
}


@dataclass(frozen=True)
class Record:
    """The measurements of one process, in turn with its limit, with a number of threads, 0 on a GPU.

    Attributes:
        name, limit: What was measured, and the limit that it is compared with.
        bytes, macs: Bytes of weights and state that must be read, and multiply-accumulates.
        seconds, limit_seconds: Of each round.
        unit, count: What a measurement yields, such as tokens, and how many of them.
    """

    name: str
    threads: int
    limit: str
    bytes: int
    macs: int
    seconds: Sequence[float]
    limit_seconds: Sequence[float]
    unit: str = ""
    count: int = 1

    @property
    def share(self) -> float:
        """The fraction of the limit's speed that was reached: the median over the rounds."""
        pairs = zip(self.seconds, self.limit_seconds, strict=True)
        return statistics.median(limit / own for own, limit in pairs)

    @property
    def limit_rate(self) -> float:
        """The bytes or multiply-accumulates per second of the limit in the median round."""
        is_arithmetic = self.limit.endswith(("arithmetic", "products"))
        return (self.macs if is_arithmetic else self.bytes) / statistics.median(self.limit_seconds)


@dataclass(frozen=True)
class Figure:
    """The records of one measurement in several processes."""

    records: Sequence[Record]

    @property
    def counted(self) -> list[Record]:
        """Those whose limit was at least 80 % of the fastest one. The others had slow memory."""
        fastest = max(record.limit_rate for record in self.records)
        return [r for r in self.records if r.limit_rate >= 0.8 * fastest]

    @property
    def share(self) -> float:
        return statistics.median(record.share for record in self.counted)

    @property
    def seconds(self) -> float:
        return statistics.median(statistics.median(r.seconds) for r in self.counted)

    @property
    def rate(self) -> float:
        """The unit of what is counted per second."""
        return self.records[0].count / self.seconds

    def to_json(self) -> dict[str, Any]:
        first = self.records[0]
        return {
            "name": first.name,
            "threads": first.threads,
            "limit": first.limit,
            "fraction_of_limit": self.share,
            "seconds": self.seconds,
            "gb_per_second": first.bytes / self.seconds / 1e9,
            "gmac_per_second": first.macs / self.seconds / 1e9,
            "rate": self.rate if first.unit else None,
            "unit": first.unit or None,
            "processes": [
                asdict(r) | {"fraction_of_limit": r.share, "is_counted": r in self.counted}
                for r in self.records
            ],
        }


def metrics(records: Iterable[Record]) -> list[Figure]:
    """A figure for each name, number of threads and limit, in the order of their first records."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.name, record.threads, record.limit), []).append(record)
    return [Figure(group) for group in groups.values()]


def measure(
    function: str, arguments: Mapping[str, Any], threads: int = 0, seconds: float | None = None
) -> Any:
    """Calls a function, `module:name`, in a new process, with values that JSON can hold, as its result.

    Args:
        function, arguments: What is called, and with what.
        threads: Number of threads that compute in the process; 0: as many as usual.
        seconds: The most that it may take.

    Raises:
        MeasurementError: The function failed, or its process ended before.
        subprocess.TimeoutExpired: It took longer.
    """
    sources = [str(plugin.source) for plugin in LOADED]
    call = {"function": function, "arguments": arguments, "plugins": sources}
    command = [sys.executable, "-m", "mlx_mmfree.evaluation.benchmark"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    options |= {"env": child_environment(threads), "timeout": seconds, "check": False}
    process = subprocess.run(command, input=json.dumps(call), **options)
    check_ending(f"the measurement of {function}", process.returncode, process.stderr)
    found = json.loads(process.stdout.splitlines()[-1])
    if "failure" in found:
        raise MeasurementError(found["failure"])
    return found["result"]


def child_environment(threads: int = 0) -> dict[str, str]:
    """The environment of a process that imports what this one can, with a number of threads."""
    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if threads:
        variables |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(threads))
    return os.environ | variables


def check_ending(what: str, status: int, errors: str) -> None:
    """Raises `MeasurementError` with the last line of `errors`, unless a process has ended well."""
    if not status:
        return
    ending = f"status {status}" if status > 0 else f"the signal {signal.Signals(-status).name}"
    ending += _SHORT_MEMORY.get(-status, "")
    lines = errors.strip().splitlines() or ["It did not say why."]
    raise MeasurementError(f"[bench] {what} ended with {ending}. {lines[-1][:_MAX_MESSAGE]}")


def result_or_failure(
    function: str, arguments: Mapping[str, Any], plugins: Sequence[str] = ()
) -> dict[str, Any]:
    """The result of a function, under `result`, or one line on why it failed, under `failure`."""
    module, _, name = function.partition(":")
    try:
        load_listed(plugins, Path())
        return {"result": getattr(importlib.import_module(module), name)(**arguments)}
    except MMFreeError as error:
        return {"failure": str(error)}
    except Exception as error:
        *_, frame = traceback.extract_tb(error.__traceback__)
        what = f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"
        reason = " ".join(str(error).split())[:_MAX_MESSAGE]
        return {"failure": f"[bench] the measurement of {function} failed: {what}: {reason}"}


def in_turn(rounds: int, limit: Callable[[], float], own: Callable[[], float]) -> dict[str, Any]:
    """Measures both in every round, the limit first: the `limit_seconds` and `seconds` of a record."""
    # the first round does not count: it starts threads, touches pages and arranges weights
    _, *times = [(limit(), own()) for _ in range(rounds + 1)]
    return dict(zip(("limit_seconds", "seconds"), zip(*times, strict=True), strict=True))


class Limits:
    """Measures what memory and arithmetic allow; the reader reads where there are no kernels that do."""

    def __init__(self, reader: MemoryReader):
        self.reader = reader
        self.threads = computing_threads()
        self.arithmetic = MULTIPLY if on_cpu() else HALF

    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        """The seconds that it takes to read all arrays once."""
        size = total_bytes(arrays)
        # reading small arrays takes mostly overhead, so that the large ones stand for them
        large = [array for array in arrays if array.nbytes * len(arrays) >= size]
        seconds = read_seconds(large)
        if seconds is None:
            seconds = self.reader.seconds(large)
        return seconds * size / total_bytes(large)

    def multiply_rate(self) -> float | None:
        """The number of multiply-accumulates per second, or `None` where it is unknown."""
        if on_cpu():
            return multiply_rate()
        a, b = mx.random.normal((2, _HALF_DIMS, _HALF_DIMS)).astype(mx.float16)
        mx.eval(a, b)
        seconds = queued_seconds(lambda: [a @ b for _ in range(_HALF_PRODUCTS)])
        return _HALF_PRODUCTS * _HALF_DIMS**3 / seconds


def computing_threads() -> int:
    """The number of threads that compute, 0 on a GPU."""
    return thread_count() if on_cpu() else 0


def measure_model(
    name: str,
    source: str,
    revision: str | None = None,
    latent: bool | None = None,
    dtype: str | None = None,
    **amounts: Any,
) -> dict[str, Any]:
    """Loads a checkpoint, as `open_checkpoint` and `load_model` do, and measures it."""
    keep_freed_memory()
    before = peak_resident_bytes()
    opened = open_checkpoint(source, revision, latent)
    model = load_model(opened, dtype=getattr(mx, dtype) if dtype else None)
    check_causal(model)
    return measure_loaded(model, name, before, **amounts)


def measure_loaded(
    model: Decoder,
    name: str,
    before: int,
    *,
    prompt_tokens: Sequence[int],
    positions: Sequence[int],
    decoded_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """The `records` of a model's prompts and decoding, and its `memory` since one of `before`."""
    loaded = peak_resident_bytes()
    records, reached = [], 0
    state: Any = None
    with memory_reader() as reader:
        found = Limits(reader)
        for length in prompt_tokens:
            records.append(_measure_prompt(found, model, name, length, rounds))
        for position in sorted(set(positions)):
            state = prefill(model, _tokens(model, position - reached), state)
            reached, title = position, f"{name}: decode after {position}"
            records.append(_measure_decode(found, model, title, state, decoded_tokens, rounds))
    memory = {"model": name, "tensor_bytes": total_bytes(nested_arrays(model))}
    memory |= {"loading_bytes": loaded - before, "peak_bytes": peak_resident_bytes() - before}
    return {"records": [asdict(record) for record in records], "memory": memory}


def _tokens(model: Decoder, length: int) -> mx.array:
    return mx.random.randint(0, model.vocab_size, (1, length))


def _measure_prompt(found: Limits, model: Decoder, name: str, length: int, rounds: int) -> Record:
    macs = ternary_macs(model) * length + head_macs(model)
    kind = READ if found.multiply_rate() is None else found.arithmetic

    def limit_seconds() -> float:
        rate = found.multiply_rate()
        return macs / rate if rate else found.read_seconds(read_weights(model))

    def prompt_seconds() -> float:
        tokens = _tokens(model, length)
        mx.eval(tokens)
        start = perf_counter()
        hidden, state = model.hidden(tokens)
        mx.eval(model.logits(hidden[:, -1:]), state)
        return perf_counter() - start

    seconds = in_turn(rounds, limit_seconds, prompt_seconds)
    name, size = f"{name}: prefill of {length}", total_bytes(read_weights(model))
    return Record(name, found.threads, kind, size, macs, **seconds, unit="tokens", count=length)


def _measure_decode(
    found: Limits, model: Decoder, title: str, state: Any, decoded_tokens: int, rounds: int
) -> Record:
    state_bytes = sum(bytes_in_use(part) for part in state or ())

    def limit_seconds() -> float:
        weights = read_weights(model)
        return found.read_seconds(weights) * (1 + state_bytes / total_bytes(weights))

    def token_seconds() -> float:
        decoding = Decoding(model, _tokens(model, 1), state=state)
        decoding.step()
        seconds = statistics.median(elapsed(decoding.step) for _ in range(decoded_tokens))
        decoding.step(is_last=True)
        return seconds

    seconds = in_turn(rounds, limit_seconds, token_seconds)
    read = state_bytes + total_bytes(read_weights(model))
    macs = ternary_macs(model) + head_macs(model)
    return Record(title, found.threads, READ, read, macs, **seconds, unit="tokens")


def bytes_in_use(state: Any) -> int:
    """The bytes of a mixer's state that the next token reads, without unused slots of buffers."""
    size = total_bytes(nested_arrays(state))
    if isinstance(state, KeyValueState) and isinstance(state.keys, mx.array):
        size = size * state.positions.shape[1] // state.keys.shape[2]
    return size


def nested_arrays(values: Any) -> list[mx.array]:
    """All arrays among nested values, as those that a module's kernels may read beside parameters."""
    flat: Any = tree_flatten(values)
    return [value for _, value in flat if isinstance(value, mx.array)]


def read_weights(model: Decoder) -> list[mx.array]:
    """The weight arrays that a decoded token reads as a whole."""
    unread = nested_arrays(model.embed) if "head" in model else []
    return [array for array in nested_arrays(model) if all(array is not other for other in unread)]


def ternary_macs(model: Decoder) -> int:
    """The multiply-accumulates of all layers of few bits in the blocks for one token."""
    return sum(
        matrix.input_dims * matrix.output_dims
        for block in model.blocks
        for matrix in matrices(block).values()
        if matrix.is_ternary or matrix.is_packed
    )


def head_macs(model: Decoder) -> int:
    """The multiply-accumulates of the head for one token."""
    return model.vocab_size * model.norm.weight.size


if __name__ == "__main__":
    print(json.dumps(result_or_failure(**json.loads(sys.stdin.read()))))
