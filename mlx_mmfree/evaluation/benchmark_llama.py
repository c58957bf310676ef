"""Measures llama.cpp, through the package `llama-cpp-python`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from ..errors import MeasurementError
from ..platform.threads import thread_count
from .benchmark_limits import Limits, limits
from .benchmark_record import READ, Record, median
from .benchmark_rounds import elapsed, in_turn

_SHORTEST_CONTEXT = 256

Feed = Callable[[int, bool], None]
"""Reads a number of tokens after those before, which it forgets first if it is told to."""


def run(
    file: str,
    name: str,
    macs: int,
    prompt_tokens: Sequence[int],
    positions: Sequence[int],
    decoded_tokens: int,
    rounds: int,
) -> tuple[list[Record], dict]:
    """Measures a GGUF file.

    Args:
        file: The file.
        name: Name to show with the results.
        macs: Number of multiply-accumulates for one token.
        prompt_tokens: Lengths of the prompts.
        positions: Numbers of tokens read before decoding is timed.
        decoded_tokens: Number of tokens decoded in each round.
        rounds: Number of measurements, after one that does not count.
    """
    size = Path(file).stat().st_size
    longest = max(*prompt_tokens, *(p + decoded_tokens for p in positions), _SHORTEST_CONTEXT)
    records = []
    with limits() as found:
        feed = _open(file, thread_count(), longest)
        for length in prompt_tokens:
            title = f"{name}: prefill of {length}"
            records.append(_measure_prompt(found, feed, title, size, macs, length, rounds))
        for position in sorted(set(positions)):
            title = f"{name}: decode after {position}"
            records.append(
                _measure_decode(found, feed, title, size, macs, position, decoded_tokens, rounds)
            )
    return records, {}


def _measure_prompt(
    found: Limits, feed: Feed, title: str, size: int, macs: int, length: int, rounds: int
) -> Record:
    def prompt_seconds() -> float:
        feed(0, True)
        return elapsed(lambda: feed(length, False))

    own, limit = in_turn(
        rounds, lambda: _limit_seconds(found, found.arithmetic, size, macs * length), prompt_seconds
    )
    return Record(
        title,
        threads=thread_count(),
        limit=found.arithmetic,
        bytes=size,
        macs=macs * length,
        seconds=own,
        limit_seconds=limit,
        unit="tokens",
        count=length,
    )


def _measure_decode(
    found: Limits,
    feed: Feed,
    title: str,
    size: int,
    macs: int,
    position: int,
    decoded_tokens: int,
    rounds: int,
) -> Record:
    def token_seconds() -> float:
        feed(0, True)
        feed(position, False)
        return median(elapsed(lambda: feed(1, False)) for _ in range(decoded_tokens))

    own, limit = in_turn(rounds, lambda: _limit_seconds(found, READ, size, 0), token_seconds)
    return Record(
        title,
        threads=thread_count(),
        limit=READ,
        bytes=size,
        macs=macs,
        seconds=own,
        limit_seconds=limit,
        unit="tokens",
    )


def _open(file: str, threads: int, longest: int) -> Feed:
    """Loads a model with room for `longest` tokens."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model_settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(file.encode(), model_settings)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = longest
    settings.n_batch = longest
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise MeasurementError(f"[bench] llama.cpp cannot load '{file}'.")

    def feed(count: int, forget: bool) -> None:
        if forget:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        if count:
            tokens = (llama_cpp.llama_token * count)(*range(1, count + 1))
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, count)):
                raise MeasurementError(f"[bench] llama.cpp cannot decode with '{file}'.")
            llama_cpp.llama_synchronize(context)

    return feed


def _limit_seconds(found: Limits, kind: str, size: int, macs: int) -> float:
    rate = found.multiply_rate() if kind == found.arithmetic else None
    if rate:
        return macs / rate
    buffer = mx.full((2**26,), 1, mx.uint32)
    return found.read_seconds([buffer]) * size / buffer.nbytes
