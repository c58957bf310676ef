"""Measures what Python costs: building the graph of a decoded token, and starting a program.

The graph is built and thrown away, and nothing is computed. The cost therefore depends on the number of
layers and operations of a model, and not on its dims. Also counted is how many texts of this library's
kernels Metal compiles for a chat, which takes no Metal.
"""

import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import process_time
from typing import Any

import mlx.core as mx
from random_models import add_config_flag, random_model

from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.cli.parts.flags import positive
from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.evaluation.audit.skeleton import read_config
from mlx_mmfree.evaluation.benchmark import check_ending, child_environment
from mlx_mmfree.generation.reader import fixed_state, with_tails
from mlx_mmfree.layers.states import TAIL_SLOTS
from mlx_mmfree.models import Decoder
from mlx_mmfree.ops import use_backend
from mlx_mmfree.ops.backend.compilation import can_compile, compiled
from mlx_mmfree.ops.backend.launch import FEW_ROWS, MAX_GROUP_ROWS, recording
from mlx_mmfree.ops.device import runs_metal_kernels

_PROGRAMS = {
    "mmfree --help": ("-m", "mlx_mmfree", "--help"),
    "import mlx_mmfree": ("-c", "import mlx_mmfree"),
    "from mlx_mmfree import generate, load": ("-c", "from mlx_mmfree import generate, load"),
    "import mlx.nn": ("-c", "import mlx.nn"),
}
_TOKENS_BEFORE = 16


LONG_PROMPT = 2 * FEW_ROWS
"""The length of a prompt that is longer than those with kernels of their own."""


@dataclass(frozen=True)
class KernelTexts:
    """Numbers of texts. Metal compiles each once, and keeps what it has compiled.

    Attributes:
        decode: Texts that decode a token.
        prompt: Texts that read a prompt of more tokens than a kernel for few rows takes.
        chat: Texts of a chat with such prompts: both together.
        every_length: Texts of chats with prompts of every length.
    """

    decode: int
    prompt: int
    chat: int
    every_length: int


def kernel_texts(model: Decoder) -> KernelTexts:
    """Counts the texts of a model that computes with the kernels that are chosen where none was timed.

    The checks at the first use of a kernel are included. MLX's own kernels are not.
    """
    with recording() as found, use_backend("metal"):
        each = model.block_arguments()

        def read(length: int, state: Any) -> Any:
            hidden, state = model.hidden(
                mx.ones((1, length), mx.int32), state, block_arguments=each
            )
            mx.eval(model.logits(hidden[:, -1:]), state)
            return state

        # the first prompt of a chat and a later one
        state = read(LONG_PROMPT, read(LONG_PROMPT, None))
        prompt = set(found)
        found.clear()
        read(1, with_tails(model, fixed_state(model, state)[0], TAIL_SLOTS))
        decode = set(found)
        # as many rows as a group can have
        for length in range(1, MAX_GROUP_ROWS + 1):
            read(length, read(length, None))
    return KernelTexts(len(decode), len(prompt), len(decode | prompt), len(prompt.union(found)))


@dataclass(frozen=True)
class GraphCost:
    """The processor time that the graph of a decoded token takes: the least of all measurements.

    Attributes:
        model: Name of the model.
        layers: Number of its blocks.
        seconds: Seconds without compilation.
        compiled_seconds: Seconds of the compiled graph, or `None` where MLX cannot compile.
        kernel_texts: How many texts Metal would compile, on a Mac or not.
    """

    model: str
    layers: int
    seconds: float
    compiled_seconds: float | None
    kernel_texts: KernelTexts


def graph_cost(name: str, config: Mapping[str, Any], rounds: int) -> GraphCost:
    """Measures a model with random weights.

    Args:
        name: Name of the model in the result.
        config: Configuration, as in a `config.json` of the Hub.
        rounds: Number of measurements.
    """
    model = random_model(config)
    block_arguments = model.block_arguments()
    tokens = mx.array([1])
    _, state = model.hidden(mx.ones((1, _TOKENS_BEFORE), mx.int32), block_arguments=block_arguments)
    mx.eval(block_arguments, tokens, state)
    step = partial(_step, model, block_arguments)
    plain = _least_seconds(lambda: step(tokens, state), rounds)
    least = None
    if can_compile():
        fixed, _ = fixed_state(model, state)
        if runs_metal_kernels():
            fixed = with_tails(model, fixed, TAIL_SLOTS)
        whole = compiled(step)
        mx.eval(fixed, whole(tokens, fixed))
        least = _least_seconds(lambda: whole(tokens, fixed), rounds)
    return GraphCost(name, len(model.blocks), plain, least, kernel_texts(model))


def _step(
    model: Decoder, block_arguments: list[dict[str, mx.array]], tokens: mx.array, state: Any
) -> Any:
    hidden, state = model.hidden(tokens[:, None], state, block_arguments=block_arguments)
    return model.logits(hidden), state


def _least_seconds(build: Callable[[], object], rounds: int) -> float:
    """The least processor time of a call, over several measurements of a few calls each."""
    build()
    # no thread of MLX is busy with what was computed before
    mx.synchronize()
    least, count = float("inf"), 4
    for _ in range(rounds):
        start = process_time()
        for _ in range(count):
            build()
        least = min(least, (process_time() - start) / count)
    return least


def start_seconds(rounds: int) -> dict[str, float]:
    """The processor time of whole Python programs, by name: the least of all measurements."""
    environment = child_environment()
    return {
        name: min(_child_seconds(arguments, environment) for _ in range(rounds))
        for name, arguments in _PROGRAMS.items()
    }


def _child_seconds(arguments: tuple[str, ...], environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    process = subprocess.run(
        command,
        env=environment,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    check_ending(shlex.join(command), process.returncode, process.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def graph_lines(cost: GraphCost) -> list[str]:
    """The cost of building the graph of a decoded token, and how many texts Metal compiles."""
    layers = cost.layers
    kinds = {"uncompiled": cost.seconds, "compiled": cost.compiled_seconds}
    parts = [
        f"{kind} {seconds * 1e6:.0f} us a token, {seconds / layers * 1e6:.1f} us a layer"
        for kind, seconds in kinds.items()
        if seconds is not None
    ]
    texts = cost.kernel_texts
    return [
        f"{cost.model}, {layers} layers, building the graph: {'; '.join(parts)}",
        f"{cost.model}, kernel texts that Metal compiles: {texts.chat} for a chat ({texts.decode} to "
        f"decode, {texts.prompt} to read long prompts), {texts.every_length} with prompts of every "
        "length",
    ]


def build_parser() -> CommandParser:
    parser = CommandParser(prog="host.py", description=__doc__)
    add_config_flag(parser)
    parser.add_argument("--rounds", type=positive, default=20, help="number of measurements (20)")
    parser.add_argument("--quick", action="store_true", help="measure once")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    rounds = 1 if args.quick else args.rounds
    costs = [graph_cost(name, read_config("bench", name), rounds) for name in args.config]
    starts = start_seconds(min(rounds, 5))
    if args.json:
        print(json.dumps({"graphs": [asdict(cost) for cost in costs], "starts": starts}))
        return 0
    lines = [line for cost in costs for line in graph_lines(cost)]
    lines += [f"starting: {time * 1e3:.0f} ms  {name}" for name, time in starts.items()]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
