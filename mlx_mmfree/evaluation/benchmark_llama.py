"""llama.cpp at the shape of BitNet-2B-4T with random TQ2_0 weights, through `llama-cpp-python`."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .benchmark_limits import Limits, limits
from .benchmark_record import MULTIPLY, READ, Record, median
from .benchmark_weights import presets

_BLOCK = 256


def write_model(file: Path, is_small: bool = False) -> dict[str, Any]:
    """Writes a GGUF file and returns its name and the configuration that it follows.

    Ternary layers are TQ2_0, and the embedding, which is the head too, Q6_K: what llama-quantize
    makes of them.

    Args:
        file: Where to.
        is_small: Whether to write two narrow blocks instead.
    """
    import gguf

    config = dict(presets()["bitnet-2b-4t"])
    if is_small:
        config = config | {
            "hidden_size": 256,
            "num_hidden_layers": 2,
            "intermediate_size": 512,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 512,
        }
    dims, hidden_dims = config["hidden_size"], config["intermediate_size"]
    key_dims = dims // config["num_attention_heads"] * config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "bitnet")
    writer.add_context_length(4096)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(dims)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(hidden_dims)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(dims // config["num_attention_heads"])
    writer.add_tokenizer_model("no_vocab")
    types = gguf.GGMLQuantizationType

    def add_norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def add_ternary(name: str, outputs: int, inputs: int) -> None:
        data = _ternary_blocks(outputs, inputs)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=types.TQ2_0)

    embedding = _embedding_blocks(config["vocab_size"], dims)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=types.Q6_K)
    add_norm("output_norm", dims)
    for n in range(config["num_hidden_layers"]):
        for norm, size in (
            ("attn_norm", dims),
            ("attn_sub_norm", dims),
            ("ffn_norm", dims),
            ("ffn_sub_norm", hidden_dims),
        ):
            add_norm(f"blk.{n}.{norm}", size)
        for linear, outputs, inputs in (
            ("attn_q", dims, dims),
            ("attn_k", key_dims, dims),
            ("attn_v", key_dims, dims),
            ("attn_output", dims, dims),
            ("ffn_gate", hidden_dims, dims),
            ("ffn_up", hidden_dims, dims),
            ("ffn_down", dims, hidden_dims),
        ):
            add_ternary(f"blk.{n}.{linear}", outputs, inputs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    block = dims * (2 * dims + 2 * key_dims + 3 * hidden_dims)
    macs = config["num_hidden_layers"] * block + config["vocab_size"] * dims
    name = "small" if is_small else "BitNet-2B-4T"
    return {"name": name, "config": config, "macs": macs}


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
        name: Shown with the results.
        macs: Multiply-accumulates for one token.
        prompt_tokens: Lengths of the prompts.
        positions: Tokens read before decoding is timed.
        decoded_tokens: Tokens decoded in each round.
        rounds: How often everything is measured, after a first time.
    """
    size = Path(file).stat().st_size
    longest = max(*prompt_tokens, *(p + decoded_tokens for p in positions), _BLOCK)
    records = []
    with limits() as found:
        feed = _open(file, found.threads, longest)
        for length in prompt_tokens:
            own, limit = [], []
            for n in range(-1, rounds):
                plain = _limit(found, MULTIPLY, size, macs * length)
                feed(0, True)
                seconds = _seconds(lambda: feed(length, False))  # noqa: B023
                if n >= 0:
                    own.append(seconds)
                    limit.append(plain)
            title = f"{name}: prefill of {length}"
            records.append(
                Record(
                    title,
                    found.threads,
                    MULTIPLY,
                    size,
                    macs * length,
                    tuple(own),
                    tuple(limit),
                    "tokens",
                    length,
                )
            )
        for position in sorted(set(positions)):
            own, limit = [], []
            for n in range(-1, rounds):
                plain = _limit(found, READ, size, 0)
                feed(0, True)
                feed(position, False)
                times = [_seconds(lambda: feed(1, False)) for _ in range(decoded_tokens)]
                if n >= 0:
                    own.append(median(times))
                    limit.append(plain)
            title = f"{name}: decode after {position}"
            records.append(
                Record(title, found.threads, READ, size, macs, tuple(own), tuple(limit), "tokens")
            )
    return records, {}


def _open(file: str, threads: int, longest: int) -> Callable[[int, bool], None]:
    """A function that reads that many tokens after those before, or forgets them first."""
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
        raise RuntimeError(f"[bench] llama.cpp does not load {file}.")

    def feed(count: int, forget: bool) -> None:
        if forget:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        if count:
            tokens = (llama_cpp.llama_token * count)(*range(1, count + 1))
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, count)):
                raise RuntimeError("[bench] llama.cpp does not decode.")
            llama_cpp.llama_synchronize(context)

    return feed


def _limit(found: Limits, kind: str, size: int, macs: int) -> float:
    rate = found.multiply_rate() if kind == MULTIPLY else None
    if rate:
        return macs / rate
    buffer = mx.full((2**26,), 1, mx.uint32)
    return found.read_seconds([buffer]) * size / buffer.nbytes


def _seconds(compute: Callable[[], None]) -> float:
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


def _ternary_blocks(outputs: int, inputs: int) -> np.ndarray:
    """TQ2_0: 64 bytes of codes 0 to 2 and a float16 scale for 256 weights."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 3, (4, outputs * inputs // _BLOCK, 64), dtype=np.uint8)
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    return _with_scale(packed, inputs**-0.5, outputs)


def _embedding_blocks(outputs: int, inputs: int) -> np.ndarray:
    """Q6_K: 192 bytes of codes, 16 of scales and a float16 scale for 256 weights."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (outputs * inputs // _BLOCK, 208), dtype=np.uint8)
    blocks[:, 192:] = 1
    return _with_scale(blocks, inputs**-0.5 / 32, outputs)


def _with_scale(blocks: np.ndarray, scale: float, outputs: int) -> np.ndarray:
    scales = np.full((len(blocks), 1), scale, np.float16).view(np.uint8)
    return np.concatenate([blocks, scales], axis=1).reshape(outputs, -1)
