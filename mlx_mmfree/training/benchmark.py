"""The speed of training steps on a CPU, in fresh processes in turn, beside PyTorch if wanted."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ..errors import TrainingError
from ..evaluation.benchmark_process import child_environment

_TASKS = {"dense": "benchmark_own", "ternary": "benchmark_own", "torch": "benchmark_torch"}
_MOST_DIFFERENCE = 1e-3
"""The largest relative difference of losses that still count as those of the same training."""


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
        program: `dense`, `ternary` or `torch`.
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
        programs: Of `dense`, `ternary` and `torch`.
        threads: Numbers of threads.
        processes: Number of fresh processes for each program.

    Raises:
        TrainingError: A process failed, or PyTorch's losses differ from those of the dense model.
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
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps({"program": program, "setup": asdict(setup), "threads": threads}),
        env=child_environment(threads),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise TrainingError(
            f"[bench] the process of '{program}' must end with status 0 but ended with "
            f"{process.returncode}: {process.stderr[-2000:]}"
        )
    return Run(**json.loads(process.stdout.splitlines()[-1]))


def _check_same(own: Sequence[float], other: Sequence[float]) -> None:
    for step, (a, b) in enumerate(zip(own, other, strict=True)):
        if abs(a - b) > _MOST_DIFFERENCE * abs(b):
            raise TrainingError(
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


def run_program(program: str, setup: dict[str, Any], threads: int) -> dict[str, Any]:
    """Times a program in this process. The arguments are JSON values."""
    module = importlib.import_module(f"{__package__}.{_TASKS[program]}")
    return asdict(module.run(Setup(**setup), program, threads))


if __name__ == "__main__":
    print(json.dumps(run_program(**json.loads(sys.stdin.read()))))
