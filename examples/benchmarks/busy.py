"""Compares two threads with one beside busy programs.

A process with one thread and a process with
several do the same work in turn, so that both meet the same load.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from product_tasks import mean_loss

from mlx_mmfree.errors import MeasurementError
from mlx_mmfree.evaluation.benchmark import child_environment
from mlx_mmfree.generation.decode import generate_tokens
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import find
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.platform.memory_reader import elapsed

TASKS = ("training", "decoding")
BUSY = "while True: pass"
CONFIG = {
    "model_type": "hgrn_bit",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 384,
}


def compare(task: str, threads: int, busy: int, rounds: int) -> list[tuple[float, float]]:
    """Measures the same work with one thread and with several, in turn.

    Args:
        task: One of `TASKS`.
        threads: Number of threads of the second process.
        busy: Number of other processes that compute all the time.
        rounds: Number of measurements of both.

    Returns:
        The seconds of both processes in each round.
    """
    with _worker(task, 1) as one, _worker(task, threads) as several, _busy(busy):
        return [(_seconds(one), _seconds(several)) for _ in range(rounds)]


@contextmanager
def _worker(task: str, threads: int) -> Iterator[subprocess.Popen]:
    environment = child_environment(threads)
    command = [sys.executable, __file__, "--worker", task]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        _seconds(process)
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _seconds(process: subprocess.Popen) -> float:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("[bench] a process has no pipes.")
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise MeasurementError("[bench] a process ended before it had measured anything.")
    return float(line)


def _work(task: str) -> None:
    keep_freed_memory()
    architecture = find(CONFIG["model_type"])
    model = architecture.build(architecture.config.from_hub(CONFIG))
    if task == "decoding":
        pack_linears(model)
    mx.eval(model.parameters())
    tokens = mx.random.randint(0, model.vocab_size, (16, 65))
    step = nn.value_and_grad(model, mean_loss)
    for _ in sys.stdin:
        if task == "training":
            seconds = elapsed(lambda: mx.eval(step(model, tokens)))
        else:
            seconds = elapsed(lambda: list(generate_tokens(model, [1, 2, 3], max_tokens=50)))
        print(seconds, flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--threads", type=int, default=2, help="number of threads to compare with one (2)"
    )
    parser.add_argument(
        "--busy", type=int, default=4, help="number of busy processes beside them (4)"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="number of measurements of each (20)"
    )
    parser.add_argument("--worker", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="measure each once")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if args.worker:
        _work(args.worker)
        return
    for task in TASKS:
        pairs = compare(task, args.threads, args.busy, 1 if args.quick else args.rounds)
        one, several = (median(seconds) for seconds in zip(*pairs, strict=True))
        ratio = sum(pair[1] for pair in pairs) / sum(pair[0] for pair in pairs)
        print(
            f"{task} beside {args.busy} busy processes: {one * 1e3:.1f} ms with one thread, "
            f"{several * 1e3:.1f} ms with {args.threads}; {ratio:.2f} times as long in all"
        )


if __name__ == "__main__":
    main()
