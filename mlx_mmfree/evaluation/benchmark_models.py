"""Speed and memory of whole models: prompts of several lengths, and decoding after them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce

from ..generation.decode import Decoding, prefill
from ..hub import load_model, open_checkpoint
from ..layers.key_value_state import KeyValueState
from ..models import Decoder
from ..platform.allocator import keep_freed_memory
from ..platform.resident_memory import peak_resident_bytes
from .benchmark_limits import Limits, held_arrays, limits
from .benchmark_record import MULTIPLY, READ, Record, median
from .benchmark_weights import head_macs, random_model, read_weights, ternary_macs

State = Any


def run(
    name: str,
    config: Mapping[str, Any] | None,
    checkpoint: str | None,
    revision: str | None,
    latent: bool,
    head_bits: int | None,
    dtype: str | None,
    prompt_tokens: Sequence[int],
    positions: Sequence[int],
    decoded_tokens: int,
    rounds: int,
) -> tuple[list[Record], dict]:
    """Measures a model with random weights, or one from a checkpoint.

    Args:
        name: Shown with the results.
        config: As a Hub `config.json`, for random weights.
        checkpoint: Folder or repository, for its weights.
        revision: Branch, tag or commit of the repository.
        latent: Whether to read latent weights.
        head_bits: Bits of a head that is not ternary, for random weights.
        dtype: Floats to compute in; `None`: those of the checkpoint or configuration.
        prompt_tokens: Lengths of the prompts.
        positions: Tokens read before decoding is timed.
        decoded_tokens: Tokens decoded in each round.
        rounds: How often everything is measured, after a first time.
    """
    before = peak_resident_bytes()
    wanted = getattr(mx, dtype) if dtype else None
    if config is None:
        model = load_model(open_checkpoint(str(checkpoint), revision, latent), dtype=wanted)
    else:
        model = random_model(config, wanted, head_bits)
    loaded = peak_resident_bytes()
    keep_freed_memory()
    records = []
    with limits() as found:
        for length in prompt_tokens:
            records.append(_measure_prompt(found, model, name, length, rounds))
        state: State = None
        reached = 0
        for position in sorted(set(positions)):
            state = prefill(model, _tokens(model, position - reached), state)
            reached = position
            records.append(
                _measure_decode(found, model, name, state, position, decoded_tokens, rounds)
            )
    tensors = sum(array.nbytes for array in held_arrays(model))
    notes = {
        "model": name,
        "tensor_bytes": tensors,
        "loading_bytes": loaded - before,
        "peak_bytes": peak_resident_bytes() - before,
    }
    return records, notes


def _tokens(model: Decoder, length: int) -> mx.array:
    return mx.random.randint(0, model.vocab_size, (1, length))


def _measure_prompt(found: Limits, model: Decoder, name: str, length: int, rounds: int) -> Record:
    macs = ternary_macs(model) * length + head_macs(model)
    weights = sum(array.nbytes for array in read_weights(model))
    kind = READ if found.multiply_rate() is None else MULTIPLY
    own, limit = [], []
    for n in range(-1, rounds):
        rate = found.multiply_rate()
        plain = macs / rate if rate else found.read_seconds(read_weights(model))
        seconds = _prompt_seconds(model, length)
        if n >= 0:
            own.append(seconds)
            limit.append(plain)
    title = f"{name}: prefill of {length}"
    return Record(
        title, found.threads, kind, weights, macs, tuple(own), tuple(limit), "tokens", length
    )


def _prompt_seconds(model: Decoder, length: int) -> float:
    tokens = _tokens(model, length)
    mx.eval(tokens)
    start = time.perf_counter()
    hidden, state = model.hidden(tokens)
    mx.eval(model.logits(hidden[:, -1:]), state)
    return time.perf_counter() - start


def _measure_decode(
    found: Limits,
    model: Decoder,
    name: str,
    state: State,
    position: int,
    decoded_tokens: int,
    rounds: int,
) -> Record:
    state_bytes = sum(_bytes_in_use(part) for part in state or ())
    own, limit = [], []
    for n in range(-1, rounds):
        weights = read_weights(model)
        size = state_bytes + sum(array.nbytes for array in weights)
        # small arrays are all overhead: the larger ones stand for them
        large = [array for array in weights if array.nbytes * len(weights) >= size]
        plain = found.read_seconds(large) * size / sum(array.nbytes for array in large)
        seconds = _token_seconds(model, state, decoded_tokens)
        if n >= 0:
            own.append(seconds)
            limit.append(plain)
    macs = ternary_macs(model) + head_macs(model)
    title = f"{name}: decode after {position}"
    return Record(title, found.threads, READ, size, macs, tuple(own), tuple(limit), "tokens")


def _bytes_in_use(state: State) -> int:
    """What the next token reads of a mixer's state: of buffers with room, the slots in use."""
    size: int = tree_reduce(lambda total, array: total + array.nbytes, state, 0)
    if isinstance(state, KeyValueState) and isinstance(state.keys, mx.array):
        size = size * state.positions.shape[1] // state.keys.shape[2]
    return size


def _token_seconds(model: Decoder, state: State, count: int) -> float:
    decoding = Decoding(model, _tokens(model, 1), state=state)
    decoding.step()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        decoding.step()
        times.append(time.perf_counter() - start)
    decoding.step(is_last=True)
    return median(times)
