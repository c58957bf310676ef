"""Speed of whole models: reading a prompt, and decoding after texts of several lengths."""

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_reduce

from ..generation.decode import Decoding, prefill
from ..models import Decoder
from ..platform.memory_reader import MemoryReader
from .benchmark_bandwidth import median
from .benchmark_products import READINGS
from .benchmark_weights import read_weights, token_bytes

State = Any


@dataclass(frozen=True)
class DecodeResult:
    """Decoding after a text of some length.

    Attributes:
        position: Tokens read before.
        token_seconds: Time of a token, the median of each round.
        read_seconds: Time of a plain read of as many bytes, by a read of the matrices, in each round.
        state_bytes: What is carried from token to token.
    """

    position: int
    token_seconds: tuple[float, ...]
    read_seconds: tuple[float, ...]
    state_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return 1 / median(self.token_seconds)

    @property
    def bandwidth_share(self) -> float:
        """Median over the rounds of the time of the plain read over that of a token."""
        pairs = zip(self.token_seconds, self.read_seconds, strict=True)
        return median([read / own for own, read in pairs])

    def to_json(self) -> dict:
        return {
            "position": self.position,
            "tokens_per_second": self.tokens_per_second,
            "bandwidth_share": self.bandwidth_share,
            "state_bytes": self.state_bytes,
            "token_seconds": list(self.token_seconds),
            "read_seconds": list(self.read_seconds),
        }


@dataclass(frozen=True)
class ModelResult:
    """One model.

    Attributes:
        name: What was measured.
        token_bytes: Bytes of weights that a decoded token reads.
        peak_bytes: The most memory that MLX held, weights included.
        prompt_tokens: Length of the prompt.
        prompt_seconds: Time until its next token is known, from the second run on.
        decode: Decoding, by position.
    """

    name: str
    token_bytes: int
    peak_bytes: int
    prompt_tokens: int
    prompt_seconds: tuple[float, ...]
    decode: tuple[DecodeResult, ...]

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / median(self.prompt_seconds)

    def to_json(self) -> dict:
        return {
            "name": self.name,
            "token_bytes": self.token_bytes,
            "peak_bytes": self.peak_bytes,
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "prompt_seconds": list(self.prompt_seconds),
            "decode": [result.to_json() for result in self.decode],
        }


def measure_model(
    reader: MemoryReader,
    model: Decoder,
    name: str,
    *,
    prompt_tokens: int,
    positions: tuple[int, ...],
    decoded_tokens: int,
    rounds: int,
) -> ModelResult:
    """Measures a model; decoding is as in `generate`, in turn with plain reads of the weights.

    Args:
        reader: Reads the weights.
        model: In its inference form.
        name: Shown in the result.
        prompt_tokens: Length of the prompt whose reading is timed.
        positions: Tokens read before decoding is timed.
        decoded_tokens: Tokens decoded in each round.
        rounds: How often everything is measured.
    """
    mx.reset_peak_memory()
    prompt_seconds = [_prompt_seconds(model, prompt_tokens) for _ in range(rounds + 1)][1:]
    decode = []
    state: State = None
    reached = 0
    for position in sorted(set(positions)):
        state = prefill(model, _tokens(model, position - reached), state)
        reached = position
        decode.append(_measure_decode(reader, model, state, position, decoded_tokens, rounds))
    return ModelResult(
        name,
        token_bytes(model),
        mx.get_peak_memory(),
        prompt_tokens,
        tuple(prompt_seconds),
        tuple(decode),
    )


def _tokens(model: Decoder, length: int) -> mx.array:
    return mx.random.randint(0, model.vocab_size, (1, length))


def _prompt_seconds(model: Decoder, length: int) -> float:
    tokens = _tokens(model, length)
    mx.eval(tokens)
    start = time.perf_counter()
    hidden, state = model.hidden(tokens)
    mx.eval(model.logits(hidden[:, -1:]), state)
    return time.perf_counter() - start


def _measure_decode(
    reader: MemoryReader,
    model: Decoder,
    state: State,
    position: int,
    decoded_tokens: int,
    rounds: int,
) -> DecodeResult:
    weights = _matrices(model)
    state_bytes = tree_reduce(lambda total, array: total + array.nbytes, state or (), 0)
    all_bytes = token_bytes(model) + state_bytes
    scale = all_bytes / sum(array.nbytes for array in weights)
    own, read = [], []
    for n in range(-1, rounds):
        plain = reader.seconds(weights, READINGS) * scale
        token = _token_seconds(model, state, decoded_tokens)
        if n >= 0:
            own.append(token)
            read.append(plain)
    return DecodeResult(position, tuple(own), tuple(read), state_bytes)


def _matrices(model: Decoder) -> list[mx.array]:
    """The larger weights: a read of a small one is all overhead."""
    weights = read_weights(model)
    mean = sum(array.nbytes for array in weights) / len(weights)
    return [array for array in weights if array.nbytes >= mean]


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
