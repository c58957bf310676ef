"""Speed and memory of whole models: reading prompts of several lengths, and decoding after them."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce

from ..generation.decode import Decoding, prefill
from ..hub import load_model, open_checkpoint
from ..layers.attention.key_values import KeyValueState
from ..models import Decoder, check_causal
from ..platform.allocator import keep_freed_memory
from ..platform.resident_memory import peak_resident_bytes
from .benchmark_limits import Limits, held_arrays, limits
from .benchmark_record import READ, Record, median
from .benchmark_rounds import elapsed, in_turn
from .benchmark_weights import head_macs, random_model, read_weights, ternary_macs

State = Any


def run(
    name: str,
    config: Mapping[str, Any] | None,
    checkpoint: str | None,
    revision: str | None,
    latent: bool | None,
    head_bits: int | None,
    dtype: str | None,
    prompt_tokens: Sequence[int],
    positions: Sequence[int],
    decoded_tokens: int,
    rounds: int,
) -> tuple[list[Record], dict]:
    """Measures a model with random weights, or one from a checkpoint.

    Args:
        name: Name to show with the results.
        config: For random weights, the configuration as in a `config.json` of the Hub.
        checkpoint: Otherwise, the folder or Hub repository.
        revision: Branch, tag or commit of the repository.
        latent: Whether float weights of a ternary Llama are master weights; `None`: as its
            configuration says.
        head_bits: For random weights, the bits of a head that is not ternary.
        dtype: Float type to compute in; `None` takes that of the checkpoint or configuration.
        prompt_tokens: Lengths of the prompts.
        positions: Numbers of tokens read before decoding is timed.
        decoded_tokens: Number of tokens decoded in each round.
        rounds: Number of measurements, after one that does not count.
    """
    before = peak_resident_bytes()
    wanted = getattr(mx, dtype) if dtype else None
    if config is None:
        opened = open_checkpoint(str(checkpoint), revision, latent)
        model = load_model(opened, dtype=wanted)
    else:
        model = random_model(config, wanted, head_bits)
    check_causal(model)
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
    kind = READ if found.multiply_rate() is None else found.arithmetic

    def limit_seconds() -> float:
        rate = found.multiply_rate()
        return macs / rate if rate else found.read_seconds(read_weights(model))

    own, limit = in_turn(rounds, limit_seconds, lambda: _prompt_seconds(model, length))
    return Record(
        f"{name}: prefill of {length}",
        threads=found.threads,
        limit=kind,
        bytes=weights,
        macs=macs,
        seconds=own,
        limit_seconds=limit,
        unit="tokens",
        count=length,
    )


def _prompt_seconds(model: Decoder, length: int) -> float:
    tokens = _tokens(model, length)
    mx.eval(tokens)

    def read() -> None:
        hidden, state = model.hidden(tokens)
        mx.eval(model.logits(hidden[:, -1:]), state)

    return elapsed(read)


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

    def read_bytes(weights: Sequence[mx.array]) -> int:
        return state_bytes + sum(array.nbytes for array in weights)

    def limit_seconds() -> float:
        weights = read_weights(model)
        size = sum(array.nbytes for array in weights)
        return found.read_seconds(weights) * read_bytes(weights) / size

    own, limit = in_turn(
        rounds, limit_seconds, lambda: _token_seconds(model, state, decoded_tokens)
    )
    return Record(
        f"{name}: decode after {position}",
        threads=found.threads,
        limit=READ,
        bytes=read_bytes(read_weights(model)),
        macs=ternary_macs(model) + head_macs(model),
        seconds=own,
        limit_seconds=limit,
        unit="tokens",
    )


def _bytes_in_use(state: State) -> int:
    """The bytes of a mixer's state that the next token reads, without unused slots of buffers."""
    size: int = tree_reduce(lambda total, array: total + array.nbytes, state, 0)
    if isinstance(state, KeyValueState) and isinstance(state.keys, mx.array):
        size = size * state.positions.shape[1] // state.keys.shape[2]
    return size


def _token_seconds(model: Decoder, state: State, count: int) -> float:
    decoding = Decoding(model, _tokens(model, 1), state=state)
    decoding.step()
    seconds = median(elapsed(decoding.step) for _ in range(count))
    decoding.step(is_last=True)
    return seconds
