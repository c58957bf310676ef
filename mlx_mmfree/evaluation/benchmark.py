"""The benchmark: the machine, ternary products and whole models, measured in one run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..models import Decoder
from ..platform.device import DeviceInfo, device_info
from ..platform.memory_reader import MemoryReader
from ..version import __version__
from .benchmark_bandwidth import measure_bandwidth, median
from .benchmark_models import ModelResult, measure_model
from .benchmark_products import SHAPES, ProductResult, measure_products, product_backend


@dataclass(frozen=True)
class BenchmarkSettings:
    """How much is measured.

    Attributes:
        buffer_bytes: Size of the buffer for the machine's bandwidth.
        walk_bytes: Memory that the copies of one matrix take at least.
        shapes: Outputs and inputs of the ternary matrices.
        rows: Tokens multiplied at a time.
        prompt_tokens: Length of the prompt whose reading is timed.
        positions: Tokens read before decoding is timed.
        decoded_tokens: Tokens decoded in each round.
        rounds: How often everything is measured.
    """

    buffer_bytes: int = 2**30
    walk_bytes: int = 2**29
    shapes: tuple[tuple[int, int], ...] = SHAPES
    rows: tuple[int, ...] = (1, 128)
    prompt_tokens: int = 128
    positions: tuple[int, ...] = (16, 512, 2048)
    decoded_tokens: int = 32
    rounds: int = 5


QUICK = BenchmarkSettings(
    buffer_bytes=2**24,
    walk_bytes=2**20,
    shapes=((256, 512),),
    rows=(1, 8),
    prompt_tokens=8,
    positions=(2, 8),
    decoded_tokens=2,
    rounds=1,
)
"""Takes seconds; its figures come from the caches and say nothing about speed."""


@dataclass(frozen=True)
class MachineResult:
    """The machine.

    Attributes:
        device: MLX's default device.
        threads: Threads that compute and read.
        backend: Backend of the ternary products.
        read_method: How the bandwidth was measured.
        bandwidths: Bytes a second of each plain read.
    """

    device: DeviceInfo
    threads: int
    backend: str
    read_method: str
    bandwidths: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "device": self.device.name,
            "memory_bytes": self.device.memory_bytes,
            "threads": self.threads,
            "backend": self.backend,
            "read_method": self.read_method,
            "read_gb_per_second": {
                "best": max(self.bandwidths) / 1e9,
                "median": median(self.bandwidths) / 1e9,
            },
        }


def measure_machine(reader: MemoryReader, settings: BenchmarkSettings) -> MachineResult:
    """Measures how fast a large buffer is read."""
    return MachineResult(
        device=device_info(),
        threads=reader.threads,
        backend=product_backend(),
        read_method=reader.method,
        bandwidths=tuple(measure_bandwidth(reader, settings.buffer_bytes, settings.rounds)),
    )


def benchmark_products(
    reader: MemoryReader, settings: BenchmarkSettings
) -> Iterable[ProductResult]:
    """Measures the ternary products, one shape after the other."""
    for output_dims, input_dims in settings.shapes:
        yield from measure_products(
            reader,
            output_dims,
            input_dims,
            rows=settings.rows,
            walk_bytes=settings.walk_bytes,
            rounds=settings.rounds,
        )


def benchmark_model(
    reader: MemoryReader, model: Decoder, name: str, settings: BenchmarkSettings
) -> ModelResult:
    """Measures a model; see `measure_model`."""
    return measure_model(
        reader,
        model,
        name,
        prompt_tokens=settings.prompt_tokens,
        positions=settings.positions,
        decoded_tokens=settings.decoded_tokens,
        rounds=settings.rounds,
    )
