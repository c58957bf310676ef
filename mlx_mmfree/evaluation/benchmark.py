"""The benchmark: which measurements are made. Each is made in several fresh processes, in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from ..ops import backend_report
from ..platform.device import device_info
from ..version import __version__
from .benchmark_process import measure
from .benchmark_record import Figure, Ratio, Record, beside, figures
from .benchmark_weights import random_packed

SHAPES = ((6912, 2560), (2560, 6912), (11264, 2048))
"""Output and input dims: up and down projection of BitNet-2B-4T, stacked gates of MMfreeLM-1.3B."""


@dataclass(frozen=True)
class BenchmarkSettings:
    """How much is measured.

    Attributes:
        processes: Number of fresh processes for each measurement.
        rounds: Number of measurements in each process.
        walk_bytes: Smallest number of bytes that the copies of one matrix take together.
        shapes: Output and input dims of the ternary matrices.
        rows: Numbers of tokens multiplied at a time.
        heads: Output and input dims of the heads.
        head_bits: Bits of the heads' weights.
        prompt_tokens: Lengths of the prompts whose reading is timed.
        positions: Numbers of tokens read before decoding is timed.
        decoded_tokens: Number of tokens decoded in each round.
        training_tokens: Number of tokens in the training batch.
        is_small: Whether to train a tiny model, and to compare llama.cpp with one.
    """

    processes: int = 8
    rounds: int = 5
    walk_bytes: int = 2**29
    shapes: tuple[tuple[int, int], ...] = SHAPES
    rows: tuple[int, ...] = (1, 128)
    heads: tuple[tuple[int, int], ...] = ((128256, 2560),)
    head_bits: tuple[int, ...] = (4, 6, 8, 16)
    prompt_tokens: tuple[int, ...] = (128, 512)
    positions: tuple[int, ...] = (16, 512, 2048)
    decoded_tokens: int = 16
    training_tokens: int = 512
    is_small: bool = False


ON_GPU = BenchmarkSettings(processes=3, rows=(1, 8, 32, 128))
"""What is measured on a GPU, by fewer processes, as each measures for longer."""

QUICK = BenchmarkSettings(
    processes=1,
    rounds=1,
    walk_bytes=2**20,
    shapes=((256, 512),),
    rows=(1, 8),
    heads=((512, 256),),
    prompt_tokens=(8,),
    positions=(2, 8),
    decoded_tokens=2,
    training_tokens=8,
    is_small=True,
)
"""A run of seconds. Its data fit into the caches, so that its figures say nothing about speed."""


@dataclass(frozen=True)
class ModelChoice:
    """A model to measure: a configuration with random weights, or a checkpoint.

    Attributes:
        name: Name to show with the results.
        config: Configuration, as in a `config.json` of the Hub.
        checkpoint: Folder or Hub repository.
        revision: Branch, tag or commit of the repository.
        latent: Whether float weights of a ternary Llama are master weights; `None`: as its
            configuration says.
        head_bits: With random weights, the bits of a head that is not ternary.
        dtype: Float type to compute in.
    """

    name: str
    config: Mapping[str, Any] | None = None
    checkpoint: str | None = None
    revision: str | None = None
    latent: bool | None = None
    head_bits: int | None = None
    dtype: str | None = None


@dataclass
class Report:
    """Everything that was measured.

    Attributes:
        machine: What the machine is and what its limits are.
        figures: The figures in the order of measurement.
        memory: The memory use of each model in each process.
        ratios: Speed in relation to other programs and libraries.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "figures": [figure.to_json() for figure in self.figures],
            "memory": self.memory,
            "ratios": [asdict(ratio) for ratio in self.ratios],
        }


def benchmark(
    settings: BenchmarkSettings,
    threads: Sequence[int],
    *,
    products: bool = True,
    training: bool = True,
    models: Sequence[ModelChoice] = (),
    compare: bool = False,
) -> Iterator[Report]:
    """Measures one thing after the other. Each report holds what the last measurement added.

    Args:
        settings: How much is measured.
        threads: Numbers of threads to measure with, 0 for a GPU. Models and training use the last.
        products: Whether to measure ternary products and heads.
        training: Whether to measure a training step.
        models: The models to measure.
        compare: Whether to measure llama.cpp in the shape of BitNet-2B-4T, in turn with this library.

    Raises:
        MeasurementError: A process failed.
    """
    yield Report(machine=_describe())
    if products:
        tasks = [("products", _products(settings), count) for count in threads]
        found, notes = _in_turn(tasks, settings.processes)
        measured = figures(found)
        yield Report(_best(notes), measured, ratios=beside(measured))
    if training:
        task = ("training", _training(settings), threads[-1])
        yield Report(figures=figures(_in_turn([task], settings.processes)[0]))
    for choice in models:
        task = ("model", _model(choice, settings), threads[-1])
        found, notes = _in_turn([task], settings.processes)
        yield Report(figures=figures(found), memory=notes)
    if compare:
        yield _compare(settings, threads[-1])


Task = tuple[str, dict[str, Any], int]


def _in_turn(tasks: Sequence[Task], processes: int) -> tuple[list[Record], list[dict]]:
    records, notes = [], []
    for _ in range(processes):
        for task, arguments, threads in tasks:
            found, said = measure(task, arguments, threads)
            records += found
            if said:
                notes.append(said | {"threads": threads})
    return records, notes


def _describe() -> dict[str, Any]:
    device = device_info()
    report = backend_report(
        "mlx_mmfree.ops.ternary_matmul", mx.zeros((1, 32)), random_packed(1, 32), codes=True
    )
    return {
        "version": __version__,
        "device": device.name,
        "memory_bytes": device.memory_bytes,
        "backend": next(name for name, reason in report.items() if reason is None),
    }


def _best(notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest plain read and the fastest arithmetic for each number of threads."""
    by_threads: dict[str, Any] = {}
    for note in notes:
        best = by_threads.setdefault(str(note["threads"]), {})
        for name in ("bytes_per_second", "macs_per_second"):
            best[name] = max(best.get(name) or 0, note[name] or 0) or None
        best |= {name: note[name] for name in ("read_method", "arithmetic")}
    found: dict[str, Any] = {"limits": by_threads}
    for name in ("left_out", "chosen", "switched_off"):
        if facts := {key: fact for note in notes for key, fact in note.get(name, {}).items()}:
            found[name] = facts
    return found


def _products(settings: BenchmarkSettings) -> dict[str, Any]:
    return {
        "shapes": settings.shapes,
        "rows": settings.rows,
        "heads": settings.heads,
        "head_bits": settings.head_bits,
        "walk_bytes": settings.walk_bytes,
        "rounds": settings.rounds,
    }


def _training(settings: BenchmarkSettings) -> dict[str, Any]:
    dims, layers = (64, 1) if settings.is_small else (1024, 4)
    return {
        "name": f"MatMul-free, {layers} block{'s' if layers > 1 else ''} of {dims}",
        "config": {
            "model_type": "hgrn_bit",
            "vocab_size": 64 if settings.is_small else 32000,
            "hidden_size": dims,
            "num_hidden_layers": layers,
        },
        "batch_size": 1,
        "length": settings.training_tokens,
        "rounds": settings.rounds,
    }


def _model(choice: ModelChoice, settings: BenchmarkSettings) -> dict[str, Any]:
    return vars(choice) | {
        "prompt_tokens": settings.prompt_tokens,
        "positions": settings.positions,
        "decoded_tokens": settings.decoded_tokens,
        "rounds": settings.rounds,
    }


def _compare(settings: BenchmarkSettings, threads: int) -> Report:
    from .benchmark_llama_file import write_model

    with TemporaryDirectory() as folder:
        file = Path(folder) / "random.gguf"
        written = write_model(file, settings.is_small)
        choice = ModelChoice(f"ours, {written.name}", written.config, head_bits=6)
        ours = _model(choice, settings)
        theirs = {
            "file": str(file),
            "name": f"llama.cpp, {written.name}",
            "macs": written.macs,
            "prompt_tokens": settings.prompt_tokens,
            "positions": settings.positions,
            "decoded_tokens": settings.decoded_tokens,
            "rounds": settings.rounds,
        }
        tasks = [("model", ours, threads), ("llama.cpp", theirs, threads)]
        records, notes = _in_turn(tasks, settings.processes)
    found = figures(records)
    by_name = {figure.records[0].name: figure for figure in found}
    ratios = [
        Ratio.of(name.split(": ")[-1], own, "llama.cpp with TQ2_0", other)
        for name, own in by_name.items()
        if name.startswith("ours, ")
        and (other := by_name.get(name.replace("ours, ", "llama.cpp, ", 1)))
    ]
    return Report(figures=found, memory=notes, ratios=ratios)


def join(reports: Iterator[Report], show: Callable[[Report], None]) -> Report:
    """Shows each report as it comes, and returns all of them joined into one."""
    whole = Report()
    for report in reports:
        show(report)
        whole.machine |= report.machine
        whole.figures += report.figures
        whole.memory += report.memory
        whole.ratios += report.ratios
    return whole
