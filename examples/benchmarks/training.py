"""Measures training steps of a Llama model on a CPU, beside PyTorch or with adapters if wanted."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.cli.parts.flags import positive
from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.cli.parts.terminal import aligned
from mlx_mmfree.errors import MeasurementError, UsageError
from mlx_mmfree.evaluation.benchmark import measure
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.platform.threads import thread_count
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer import AdamW
from mlx_mmfree.training.optimizer_step import OptimizerStep
from mlx_mmfree.training.run_settings import LoopSettings

_FUNCTIONS = {"dense": "training:run_own", "ternary": "training:run_own"}
_LORA = ("lora dense", "lora ternary", "lora 2-bit")
_FUNCTIONS |= dict.fromkeys(_LORA, "training:run_own")
_FUNCTIONS |= {"torch": "training_torch:run"}
_MOST_DIFFERENCE = 1e-3
"""The largest relative difference of losses that still count as equal."""


@dataclass(frozen=True)
class Setup:
    """The Llama model to train and its batches.

    Attributes:
        hidden_size: Model dims.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key and value heads.
        intermediate_size: Width of the channel mixer.
        vocab_size: Number of tokens.
        batch_size: Sequences in a step.
        length: Tokens in a sequence.
        steps: Number of steps that are timed.
    """

    hidden_size: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    intermediate_size: int = 768
    vocab_size: int = 2048
    batch_size: int = 16
    length: int = 256
    steps: int = 5

    def config(self) -> dict[str, Any]:
        """The model, as in a `config.json` of the Hub."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
        }

    def weight(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """The first value of a weight, float32. Every program begins with the same ones."""
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        rng = np.random.default_rng(list(name.encode()))
        return rng.normal(0, 0.02, shape).astype(np.float32)

    def rows(self, step: int) -> np.ndarray:
        """The token ids of a step, int32 `(batch_size, length + 1)`."""
        rng = np.random.default_rng(step)
        shape = (self.batch_size, self.length + 1)
        return rng.integers(0, self.vocab_size, shape, dtype=np.int32)


LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
WARM_UP = 2
"""Steps that are not timed: they start threads and touch memory for the first time."""


@dataclass(frozen=True)
class Run:
    """The timed steps of one process.

    Attributes:
        seconds: Of each step.
        processor_seconds: Of each step, summed over the threads.
        losses: Of each step, the untimed ones included, in nats a token.
    """

    seconds: list[float]
    processor_seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Figure:
    """The rate of one program.

    Attributes:
        program: `dense`, `ternary` or `torch`, or `lora` with the format of the base.
        threads: Number of threads.
        tokens_per_second: In the median step of all processes.
        tokens_per_processor_second: Likewise, of processor time.
        best: Tokens a second in the fastest step.
    """

    program: str
    threads: int
    tokens_per_second: float
    tokens_per_processor_second: float
    best: float


def benchmark_training(
    setup: Setup, programs: Sequence[str], threads: Sequence[int], processes: int
) -> Iterator[Figure]:
    """Measures the programs in turn, for one number of threads after the other.

    Args:
        setup: The model and its batches.
        programs: What to measure, as of `Figure`.
        threads: Numbers of threads.
        processes: Number of fresh processes for each program.

    Raises:
        MeasurementError: A process failed, or PyTorch's losses differ from the dense model's.
    """
    for count in threads:
        runs: dict[str, list[Run]] = {program: [] for program in programs}
        for _ in range(processes):
            for program in programs:
                runs[program].append(_measure(program, setup, count))
        if "torch" in runs and "dense" in runs:
            _check_same(runs["dense"][0].losses, runs["torch"][0].losses)
        for program in programs:
            yield _figure(program, count, setup.batch_size * setup.length, runs[program])


def _measure(program: str, setup: Setup, threads: int) -> Run:
    arguments = {"setup": asdict(setup), "program": program, "threads": threads}
    return Run(**measure(_FUNCTIONS[program], arguments, threads))


def _check_same(own: Sequence[float], other: Sequence[float]) -> None:
    for step, (a, b) in enumerate(zip(own, other, strict=True)):
        if abs(a - b) > _MOST_DIFFERENCE * abs(b):
            raise MeasurementError(
                f"[bench] the loss of step {step} must be PyTorch's, {b}, but is {a}. The two do not "
                "train the same model, and their speed cannot be compared."
            )


def _figure(program: str, threads: int, tokens: int, runs: Sequence[Run]) -> Figure:
    seconds = [second for run in runs for second in run.seconds]
    processor = [second for run in runs for second in run.processor_seconds]
    return Figure(
        program,
        threads,
        tokens / median(seconds),
        tokens / median(processor),
        tokens / min(seconds),
    )


_TERNARY = {"quantization_config": {"quant_method": "bitnet"}}


def run_own(setup: dict[str, Any], program: str, threads: int) -> dict[str, Any]:
    """Trains the dense or the ternary model and times each step."""
    given = Setup(**setup)
    mx.set_default_device(mx.Device(mx.cpu))
    keep_freed_memory()
    step = OptimizerStep(
        _model(given, program),
        LoopSettings(Path(), given.steps + WARM_UP, clip_norm=CLIP_NORM),
        AdamW(
            learning_rate=LEARNING_RATE,
            betas=list(BETAS),
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            bias_correction=True,
        ),
        lambda step: mx.array(LEARNING_RATE),
        lambda step: [Batch.of_rows(given.rows(step))],
        next_token_loss,
        DataParallel(),
    )
    result = Run([], [], [])
    for number in range(given.steps + WARM_UP):
        start = time.perf_counter(), time.process_time()
        done = step(number)
        if number >= WARM_UP:
            result.seconds.append(time.perf_counter() - start[0])
            result.processor_seconds.append(time.process_time() - start[1])
        result.losses.append(done.loss / done.tokens)
    return asdict(result)


def _model(setup: Setup, program: str) -> Decoder:
    architecture = find("llama")
    config = setup.config() | (_TERNARY if program.endswith("ternary") else {})
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    parameters: Any = tree_flatten(model.parameters())
    weights = [(name, mx.array(setup.weight(name, weight.shape))) for name, weight in parameters]
    model.update(tree_unflatten(weights))
    if program in _LORA:
        if program.endswith("2-bit"):
            # the dense model in the format of Bonsai
            group_size = math.gcd(_GROUP, setup.hidden_size, setup.intermediate_size)
            nn.quantize(model, group_size, 2, class_predicate=_is_in_a_block)
        pack_linears(model)
        adapt_layers(model)
    model.train()
    mx.eval(model.parameters())
    return model


_GROUP = 128


def _is_in_a_block(path: str, module: nn.Module) -> bool:
    return path.startswith("blocks.") and isinstance(module, nn.Linear)


_SETUP = {
    "hidden_size": "model dims",
    "layers": "number of blocks",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "intermediate_size": "width of the feed-forward",
    "vocab_size": "number of tokens in the vocabulary",
    "batch_size": "sequences in a step",
    "length": "tokens in a sequence",
    "steps": "steps that are timed in each process",
}
_QUICK = {
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 64,
    "batch_size": 2,
    "length": 8,
    "steps": 1,
}


def build_parser() -> CommandParser:
    parser = CommandParser(prog="training.py", description=__doc__)
    parser.add_argument(
        "--compare",
        choices=("torch", "lora"),
        help="torch: also train the same dense model with PyTorch, from the same weights and batches; "
        "lora: instead train adapters beside dense and packed weights",
    )
    parser.add_argument(
        "--threads", type=positive, nargs="+", help="numbers of threads (1 and all processors)"
    )
    parser.add_argument(
        "--processes",
        type=positive,
        default=3,
        help="number of fresh processes for each program, which take turns (3)",
    )
    for name, what in _SETUP.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=what)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try the command in seconds; its numbers say nothing about speed",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.compare == "torch" and find_spec("torch") is None:
        raise UsageError(
            "[bench] 'compare' needs the package torch, which is not installed. Install it: pip "
            "install torch"
        )
    setup = _setup(args)
    programs = ["dense", "ternary", *(["torch"] if args.compare == "torch" else [])]
    if args.compare == "lora":
        programs = [*_LORA]
    threads = args.threads or sorted({1, thread_count()})
    processes = 1 if args.quick else args.processes
    metrics = benchmark_training(setup, programs, threads, processes)
    if args.json:
        found = [asdict(figure) for figure in metrics]
        print(json.dumps({"setup": asdict(setup), "metrics": found}))
        return 0
    for line in _lines(list(_announced(metrics))):
        print(line)
    return 0


def _setup(args: argparse.Namespace) -> Setup:
    known = asdict(Setup()) | (_QUICK if args.quick else {})
    given: dict[str, int] = {name: getattr(args, name) or known[name] for name in _SETUP}
    for name, divisor in (("hidden_size", "heads"), ("heads", "kv_heads")):
        if given[name] % given[divisor]:
            raise UsageError(
                f"[bench] '{name}' must be a multiple of {divisor}, {given[divisor]}, but got "
                f"{given[name]}. Change one of them."
            )
    if given["hidden_size"] // given["heads"] % 2:
        raise UsageError(
            "[bench] 'hidden_size' must give each head an even number of dims but got "
            f"{given['hidden_size']} for {given['heads']} heads. Change one of them."
        )
    return Setup(**given)


def _announced(metrics: Iterator[Figure]) -> Iterator[Figure]:
    """Yields the metrics with a progress bar, where stderr is a terminal."""
    with tqdm(unit="figure", disable=None, dynamic_ncols=True) as bar:
        for figure in metrics:
            bar.update()
            yield figure


def _lines(metrics: Sequence[Figure]) -> list[str]:
    rows = [["threads", "program", "tokens/s", "best", "tokens/processor s", "of dense"]]
    for figure in metrics:
        dense = next(
            each
            for each in metrics
            if each.program.endswith("dense") and each.threads == figure.threads
        )
        share = figure.tokens_per_processor_second / dense.tokens_per_processor_second
        rows.append(
            [
                str(figure.threads),
                figure.program,
                f"{figure.tokens_per_second:,.0f}",
                f"{figure.best:,.0f}",
                f"{figure.tokens_per_processor_second:,.0f}",
                f"{100 * share:.0f} %",
            ]
        )
    return aligned(rows, left=2)


if __name__ == "__main__":
    sys.exit(main())
