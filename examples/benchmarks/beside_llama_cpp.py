"""Measures llama.cpp beside this library, with a model in the shape of BitNet-2B-4T with random weights.

llama.cpp reads them from a GGUF file in TQ2_0, with a head in Q6_K. With `--type q1_0` or `q2_0`, both
read one file of that type instead, with four blocks in the shape of a Bonsai model (`--config`). Needs
llama-cpp-python and gguf.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from products import (
    MODEL,
    QUICK,
    BenchmarkSettings,
    Ratio,
    Report,
    measured_in_turn,
    model_amounts,
    report_lines,
)
from random_models import write_tokenizer

from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.cli.parts.flags import positive
from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.errors import MeasurementError, UsageError
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.evaluation.benchmark import READ, Limits, Record, in_turn, metrics
from mlx_mmfree.evaluation.scaled import draw_weights
from mlx_mmfree.hub import convert, open_checkpoint, save_model
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.platform.memory_reader import elapsed, memory_reader
from mlx_mmfree.platform.threads import thread_count

_SHORTEST_CONTEXT = 256

Feed = Callable[[int, bool], None]
"""Reads a number of tokens after those before, which it forgets first if it is asked to."""


def measure_llama_cpp(
    file: str,
    name: str,
    macs: int,
    prompt_tokens: Sequence[int],
    positions: Sequence[int],
    decoded_tokens: int,
    rounds: int,
) -> dict[str, Any]:
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
    with memory_reader() as reader:
        found = Limits(reader)
        feed = _open(file, thread_count(), longest)
        for length in prompt_tokens:
            title = f"{name}: prefill of {length}"
            records.append(_measure_prompt(found, feed, title, size, macs, length, rounds))
        for position in sorted(set(positions)):
            title = f"{name}: decode after {position}"
            records.append(
                _measure_decode(found, feed, title, size, macs, position, decoded_tokens, rounds)
            )
    return {"records": [asdict(record) for record in records]}


def _measure_prompt(
    found: Limits, feed: Feed, title: str, size: int, macs: int, length: int, rounds: int
) -> Record:
    def prompt_seconds() -> float:
        feed(0, True)
        return elapsed(lambda: feed(length, False))

    seconds = in_turn(
        rounds, lambda: _limit_seconds(found, found.arithmetic, size, macs * length), prompt_seconds
    )
    return Record(
        title,
        threads=thread_count(),
        limit=found.arithmetic,
        bytes=size,
        macs=macs * length,
        **seconds,
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

    seconds = in_turn(rounds, lambda: _limit_seconds(found, READ, size, 0), token_seconds)
    return Record(
        title,
        threads=thread_count(),
        limit=READ,
        bytes=size,
        macs=macs,
        **seconds,
        unit="tokens",
    )


def _open(file: str, threads: int, longest: int) -> Feed:
    """Loads a model with capacity for `longest` tokens."""
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


FULL = BenchmarkSettings()
SHORT = replace(FULL, prompt_tokens=(128,), positions=(16,))
FILE = "mlx_mmfree.evaluation.benchmark:measure_model"
_BLOCK = 256
_SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class WrittenModel:
    """The contents of a file.

    Attributes:
        name: Name to show with the results.
        config: Configuration of the same shape, as in a `config.json` of the Hub.
        macs: Number of multiply-accumulates for one token.
    """

    name: str
    config: Mapping[str, Any]
    macs: int


def write_model(file: Path, is_small: bool = False) -> WrittenModel:
    """Writes the file.

    As llama-quantize would do, the ternary layers are written as TQ2_0, and the embedding, which is
    also the head, as Q6_K.

    Args:
        file: The file to write.
        is_small: Whether to write two narrow blocks instead.
    """
    import gguf

    config = {**presets()["bitnet-2b-4t"], **(_SMALL if is_small else {})}
    writer = gguf.GGUFWriter(file, "bitnet")
    _add_header(writer, config)
    types = gguf.GGMLQuantizationType
    embedding = _q6_k(config["vocab_size"], config["hidden_size"])
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=types.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(config["hidden_size"], np.float32))
    norms, linears = _block_shapes(config)
    for n in range(config["num_hidden_layers"]):
        for name, size in norms.items():
            writer.add_tensor(f"blk.{n}.{name}.weight", np.ones(size, np.float32))
        for name, (outputs, inputs) in linears.items():
            weight = _tq2_0(outputs, inputs)
            writer.add_tensor(f"blk.{n}.{name}.weight", weight, raw_dtype=types.TQ2_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    block = sum(outputs * inputs for outputs, inputs in linears.values())
    head = config["vocab_size"] * config["hidden_size"]
    name = "small" if is_small else "BitNet-2B-4T"
    return WrittenModel(name, config, config["num_hidden_layers"] * block + head)


CONFIG = "ternary-bonsai-1.7b"


def write_codes(
    file: Path, kind: str, config_name: str = CONFIG, is_small: bool = False
) -> WrittenModel:
    """Writes four blocks in the shape of a published model, whose matrices are all of one type.

    Args:
        file: The file to write.
        kind: `Q1_0` or `Q2_0`.
        config_name: The model, one that has codes of 2 bits.
        is_small: Whether to write two narrow blocks instead.
    """
    config = {**presets()[config_name], "num_hidden_layers": 4, **(_SMALL if is_small else {})}
    if kind == "Q1_0":
        config["quantization"] = {**config["quantization"], "bits": 1}
    model = skeleton(config, mx.float32)
    draw_weights(model)
    with TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save_model(folder, model)
        write_tokenizer(folder, model.vocab_size)
        opened, target = open_checkpoint(str(folder)), Path(name) / "gguf"
        gguf_type: Any = kind.lower()
        convert(opened, target, to="gguf", gguf_type=gguf_type, check=False)
        [written] = target.glob("*.gguf")
        shutil.move(written, file)
    name = f"{'small' if is_small else f'4 blocks of {config_name}'} in {kind}"
    coded = (each for each in matrices(model).values() if each.holds_codes)
    return WrittenModel(name, config, sum(each.input_dims * each.output_dims for each in coded))


def _add_header(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(4096)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_tokenizer_model("no_vocab")


def _block_shapes(
    config: Mapping[str, Any],
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """The sizes of a block's norms, and the output and input dims of its linear layers."""
    dims, hidden_dims = config["hidden_size"], config["intermediate_size"]
    key_dims = dims // config["num_attention_heads"] * config["num_key_value_heads"]
    norms = {
        "attn_norm": dims,
        "attn_sub_norm": dims,
        "ffn_norm": dims,
        "ffn_sub_norm": hidden_dims,
    }
    linears = {
        "attn_q": (dims, dims),
        "attn_k": (key_dims, dims),
        "attn_v": (key_dims, dims),
        "attn_output": (dims, dims),
        "ffn_gate": (hidden_dims, dims),
        "ffn_up": (hidden_dims, dims),
        "ffn_down": (dims, hidden_dims),
    }
    return norms, linears


def _tq2_0(outputs: int, inputs: int) -> np.ndarray:
    """For 256 weights, 64 bytes with codes 0 to 2 and a float16 scale."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 3, (4, outputs * inputs // _BLOCK, 64), dtype=np.uint8)
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    return _with_scale(packed, inputs**-0.5, outputs)


def _q6_k(outputs: int, inputs: int) -> np.ndarray:
    """For 256 weights, 192 bytes with codes, 16 bytes with scales and a float16 scale."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (outputs * inputs // _BLOCK, 208), dtype=np.uint8)
    blocks[:, 192:] = 1
    return _with_scale(blocks, inputs**-0.5 / 32, outputs)


def _with_scale(blocks: np.ndarray, scale: float, outputs: int) -> np.ndarray:
    scales = np.full((len(blocks), 1), scale, np.float16).view(np.uint8)
    return np.concatenate([blocks, scales], axis=1).reshape(outputs, -1)


def compare(
    settings: BenchmarkSettings, threads: int, kind: str = "TQ2_0", config_name: str = CONFIG
) -> Report:
    """Measures both in turn, in fresh processes, and how many times as fast this library is.

    Args:
        settings: How much is measured.
        threads: Number of threads.
        kind: The type of the file: `TQ2_0`, `Q2_0` or `Q1_0`.
        config_name: The model whose blocks files of the last two have.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "random.gguf"
        is_bitnet, amounts = kind == "TQ2_0", model_amounts(settings)
        written = (
            write_model(file, settings.is_small)
            if is_bitnet
            else write_codes(file, kind, config_name, settings.is_small)
        )
        theirs = {"file": str(file), "name": f"llama.cpp, {written.name}", "macs": written.macs}
        ours = {"config": written.config, "head_bits": 6} if is_bitnet else {"source": str(file)}
        ours["name"] = f"ours, {written.name}"
        tasks = [
            (MODEL if is_bitnet else FILE, ours | amounts, threads),
            ("beside_llama_cpp:measure_llama_cpp", theirs | amounts, threads),
        ]
        records, notes = measured_in_turn(tasks, settings.processes)
    found = metrics(records)
    by_name = {figure.records[0].name: figure for figure in found}
    ratios = [
        Ratio.of(name.split(": ")[-1], own, f"llama.cpp with {kind}", other)
        for name, own in by_name.items()
        if name.startswith("ours, ")
        and (other := by_name.get(name.replace("ours, ", "llama.cpp, ", 1)))
    ]
    return Report(metrics=found, memory=notes, ratios=ratios)


def build_parser() -> CommandParser:
    parser = CommandParser(prog="beside_llama_cpp.py", description=__doc__)
    parser.add_argument(
        "--type",
        nargs="+",
        choices=("tq2_0", "q2_0", "q1_0"),
        default=["tq2_0"],
        help="types of the files: tq2_0 as BitNet-2B-4T, others as blocks of `--config` (tq2_0)",
    )
    parser.add_argument(
        "--config",
        choices=[name for name in presets() if "bonsai" in name],
        default=CONFIG,
        help="model whose blocks a file of q2_0 or q1_0 has (%(default)s)",
    )
    parser.add_argument("--threads", type=positive, help="number of threads (all processors)")
    parser.add_argument(
        "--processes", type=positive, help="number of fresh processes of each program (8)"
    )
    for name, nargs, text in (
        ("rounds", None, "measurements in each process (5)"),
        ("prompt-tokens", "+", "lengths of the prompts"),
        ("positions", "+", "numbers of tokens before decoding is timed"),
        ("decoded-tokens", None, "tokens decoded in each round (16)"),
    ):
        parser.add_argument(f"--{name}", type=positive, nargs=nargs, help=text)
    parser.add_argument(
        "--quick", action="store_true", help="try it with two narrow blocks, in seconds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    for module, package in (("llama_cpp", "llama-cpp-python"), ("gguf", "gguf")):
        if find_spec(module) is None:
            raise UsageError(
                f"[bench] the package {package} is needed, which is not installed. Install it: pip "
                f"install {package}"
            )
    given = {
        name: value
        for name in ("processes", "rounds", "prompt_tokens", "positions", "decoded_tokens")
        if (value := getattr(args, name)) is not None
    }
    report = Report()
    for kind in args.type:
        usual = QUICK if args.quick else FULL if kind == "tq2_0" else SHORT
        settings = replace(usual, **given)
        found = compare(settings, args.threads or thread_count(), kind.upper(), args.config)
        report.metrics += found.metrics
        report.memory += found.memory
        report.ratios += found.ratios
    print(json.dumps(report.to_json()) if args.json else "\n".join(report_lines(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
