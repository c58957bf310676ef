"""Records which version wrote a checkpoint, and tells whether its ternary weights can be trusted.

The `config.json` of a written folder has an object `mlx_mmfree`, and GGUF metadata have the same keys:

- `version` is that of the library that wrote the folder;
- `rounding` says how its ternary weights were made of floats. It is a number like
  `ops.ternary.ROUNDING_VERSION`, or `"source"` if the weights were ternary before. It is left out if
  that is not known;
- `adapter` is true if the files of an adapter lie beside the weights, and both are the model.

Folders without a record may hold wrong scales and trits in matrices of more than `MAX_SOUND_WEIGHTS`
numbers. Checkpoints that were packed by other programs have scales that are 16-bit floats or reciprocals
of such floats. A mean of absolute values, which this library computes, is not.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...files import safetensors
from ...files.checkpoint_files import GGUF_SUFFIX
from ...files.safetensors_writer import METADATA
from ...files.tensor_entry import TensorEntry, read_tensor
from ...ops.ternary import CODES_PER_WORD, ROUNDING_VERSION
from ...version import __version__
from .checkpoint import Checkpoint
from .forms import bitnet_format
from .forms.packed_format import WRITER_KEY
from .notice import notify

Rounding = int | str | None

MAX_SOUND_WEIGHTS = 2**20
"""The scale of a matrix of up to so many numbers was off by less than 1e-4 in any version."""

_SCALE = ".weight_scale"


def record(rounding: Rounding) -> dict[str, Any]:
    """The value of the key `mlx_mmfree`."""
    known = {} if rounding is None else {"rounding": rounding}
    return {"version": __version__, **known}


def read_record(config: Mapping[str, Any]) -> Rounding:
    """What a configuration says of the rounding; `None` if it says nothing."""
    described = config.get(WRITER_KEY)
    rounding = described.get("rounding") if isinstance(described, Mapping) else None
    is_known = rounding == "source" or (type(rounding) is int and rounding > 0)
    return rounding if is_known else None


def rounding_of(checkpoint: Checkpoint) -> Rounding:
    """How the ternary weights of a checkpoint were made of floats.

    Returns:
        A version, which is the present one for masters, since they are rounded as they are read;
        `"source"`; or `None` if the weights may be wrong.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    recorded = read_record(checkpoint.config)
    if recorded is not None:
        return recorded
    scales = [entry for name, entry in checkpoint.tensors.items() if name.endswith(_SCALE)]
    if not scales:
        return ROUNDING_VERSION
    large = [entry for entry in scales if _weights(checkpoint, entry) > MAX_SOUND_WEIGHTS]
    if not _is_own(checkpoint) or all(map(_is_from_16_bits, large)):
        return "source"
    return None


def checked_rounding(checkpoint: Checkpoint) -> Rounding:
    """The result of `rounding_of`, with a notice on stderr if the weights may be wrong."""
    rounding = rounding_of(checkpoint)
    if rounding != "source" and not (isinstance(rounding, int) and rounding >= ROUNDING_VERSION):
        notify(
            f"'{checkpoint.folder}' may hold wrong ternary weights: it was written by an older "
            "version, whose scales of large matrices were too small where a CPU computed them. Make "
            "it again from the float weights."
        )
    return rounding


def _is_own(checkpoint: Checkpoint) -> bool:
    """Whether this library may have rounded the weights."""
    described = checkpoint.config.get("quantization_config")
    files = {entry.file for entry in checkpoint.tensors.values()}
    if not isinstance(described, Mapping) or described.get("linear_class") == "linear":
        return False
    if any(file.suffix == GGUF_SUFFIX for file in files):
        return False
    if not bitnet_format.is_packed(described):
        return True
    return all(safetensors.read_header(file)[1] == METADATA for file in files)


def _weights(checkpoint: Checkpoint, scale: TensorEntry) -> int:
    """How many numbers the matrix of a scale has."""
    weight = checkpoint.tensors.get(scale.name.removesuffix("_scale"))
    if weight is None or len(weight.shape) != 2:
        return 0
    packed = {mx.uint8: bitnet_format.CODES_PER_BYTE, mx.uint32: CODES_PER_WORD}
    return weight.shape[0] * weight.shape[1] * packed.get(weight.dtype, 1)


def _is_from_16_bits(entry: TensorEntry) -> bool:
    scale = read_tensor(entry).astype(mx.float32)
    rounded = (
        way(way(scale).astype(dtype).astype(mx.float32))
        for way in (lambda x: x, mx.reciprocal)
        for dtype in (mx.bfloat16, mx.float16)
    )
    return any(mx.array_equal(each, scale).item() for each in rounded)
