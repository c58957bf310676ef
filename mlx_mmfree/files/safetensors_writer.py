"""Writes safetensors files tensor by tensor, so that only one is in memory at a time.

`mx.save_safetensors` needs all tensors at once.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from .checkpoint_files import INDEX_FILE, WEIGHTS_FILE
from .json_file import write_json
from .safetensors import DTYPES

MAX_SHARD_BYTES = 5 * 10**9
METADATA = {"format": "mlx"}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorSpec:
    """The description of a tensor before it is made.

    Attributes:
        name: Its name in the file.
        dtype: Its dtype.
        shape: Its shape.
    """

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


@dataclass(frozen=True)
class PlannedTensors:
    """Tensors that are made together and are stored in one file.

    Attributes:
        specs: The descriptions of the tensors.
        make: Makes the tensors, in the same order.
    """

    specs: tuple[TensorSpec, ...]
    make: Callable[[], Sequence[mx.array]]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @classmethod
    def of(cls, name: str, array: mx.array) -> "PlannedTensors":
        """The plan of a tensor that is in memory already."""
        return cls((TensorSpec(name, array.dtype, array.shape),), lambda: (array,))


def write_safetensors(
    file: Path,
    plan: Iterable[PlannedTensors],
    metadata: Mapping[str, str] = METADATA,
    on_bytes: Callable[[int], object] | None = None,
) -> None:
    """Writes one file to the disk.

    Args:
        file: The file to make.
        plan: Its tensors, in their order in the file.
        metadata: Texts for the header.
        on_bytes: Called after each tensor with the number of its bytes.

    Raises:
        OSError: The file cannot be written.
    """
    groups = list(plan)
    with open(file, "wb") as stream:
        stream.write(file_head((spec for group in groups for spec in group.specs), metadata))
        for group in groups:
            for spec, array in zip(group.specs, group.make(), strict=True):
                if (array.dtype, array.shape) != (spec.dtype, spec.shape):
                    raise RuntimeError(
                        f"tensor {spec.name!r} was planned as {spec.dtype} {spec.shape} but is "
                        f"{array.dtype} {array.shape}"
                    )
                stream.write(tensor_bytes(array).data)
                if on_bytes is not None:
                    on_bytes(spec.nbytes)
            mx.clear_cache()


def file_head(specs: Iterable[TensorSpec], metadata: Mapping[str, str] = METADATA) -> bytes:
    """What a file begins with; the bytes of its tensors follow, one behind the other."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(array: mx.array) -> np.ndarray:
    """The bytes of an array, row by row, as `uint8` of one axis."""
    return np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8))


def write_shards(
    folder: Path,
    plan: Iterable[PlannedTensors],
    on_bytes: Callable[[int], object] | None = None,
    max_bytes: int | None = None,
) -> None:
    """Writes a checkpoint's tensors as one file, or as several with an index.

    Args:
        folder: The folder of the checkpoint.
        plan: The tensors.
        on_bytes: As for `write_safetensors`.
        max_bytes: The largest size of a file, unless one group of tensors is larger. Default: 5 GB.
    """
    max_bytes = MAX_SHARD_BYTES if max_bytes is None else max_bytes
    shards: list[list[PlannedTensors]] = [[]]
    size = 0
    for group in plan:
        if shards[-1] and size + group.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.nbytes
    if len(shards) == 1:
        write_safetensors(folder / WEIGHTS_FILE, shards[0], on_bytes=on_bytes)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, on_bytes=on_bytes)
        places.update((spec.name, name) for group in shard for spec in group.specs)
    total = sum(group.nbytes for shard in shards for group in shard)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
