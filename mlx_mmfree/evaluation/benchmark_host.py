"""What Python costs: building the graph of a decoded token, and starting a program.

The graph is built and thrown away, and nothing is computed. The cost therefore depends on the number of
layers and operations of a model, and not on its dims.
"""

import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from time import process_time
from typing import Any

import mlx.core as mx

from ..generation.states import fixed_state
from ..models import Decoder
from ..ops.backend.compilation import can_compile, compiled
from .benchmark_process import check_ending, child_environment
from .benchmark_texts import KernelTexts, kernel_texts
from .benchmark_weights import random_model

_PROGRAMS = {
    "mmfree --help": ("-m", "mlx_mmfree", "--help"),
    "import mlx_mmfree": ("-c", "import mlx_mmfree"),
    "from mlx_mmfree import generate, load": ("-c", "from mlx_mmfree import generate, load"),
    "import mlx.nn": ("-c", "import mlx.nn"),
}
_TOKENS_BEFORE = 16


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
