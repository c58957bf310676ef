"""How BitNet checkpoints of the Hub store ternary linears, by their `quantization_config`.

With `quant_method` `bitnet` and `quantization_mode` `offline`, which is the default, a linear `X` of N
outputs has

- `X.weight`, `uint8` of shape `(N / 4, inputs)`: the two bits at `2 * i` of row `j` are the code
  `trit + 1` of output `i * N / 4 + j`;
- `X.weight_scale`, one float: the weight is `trit * weight_scale` if `linear_class` is
  `autobitlinear`, and `trit / weight_scale` if it is `bitlinear`, the default;
- `X.bias`, if any: transformers multiplies it by the scale too if `linear_class` is `autobitlinear`.

With `quantization_mode` `online` the weights are float masters. Fine-tuning needs them, so they are
published too, sometimes with a configuration that does not say so. A model that uses them without
ternarising them writes gibberish.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import UnsupportedModelError
from ....files.tensors import TensorEntry, TensorSpec, host_array, read_tensor
from ....ops.device import FLOATS
from ....ops.host_blocks import blocks
from ....ops.ternary import CODES_PER_WORD, packed_width
from .. import weight_format
from .packed import open_packed

QUANT_METHOD = "bitnet"
CODES_PER_BYTE = 4

_PADDING = 0b01010101
# Four neighbouring bytes are a 4 x 4 matrix of codes. Swapping the bits of each mask with those at a
# distance above them transposes it, so that each byte holds the codes of one row.
_SWAPS = tuple(
    (np.uint32(distance), np.uint32(mask)) for distance, mask in ((6, 0x00CC00CC), (12, 0x0000F0F0))
)

_FORMATS = {
    ("bitlinear", "offline"),
    ("autobitlinear", "offline"),
    ("autobitlinear", "online"),
}


def check_format(described: Mapping[str, Any]) -> None:
    """Refuses combinations of linear class and mode that do not exist.

    Raises:
        UnsupportedModelError: The combination is not known.
    """
    format = _format(described)
    if not all(isinstance(part, str) for part in format) or format not in _FORMATS:
        known = ", ".join(" / ".join(pair) for pair in sorted(_FORMATS))
        raise UnsupportedModelError(
            "[config.json] 'linear_class' and 'quantization_mode' must be one of "
            f"{known} but got {format[0]!r:.80} and {format[1]!r:.80}. Take config.json from the "
            "original checkpoint."
        )


def _format(described: Mapping[str, Any]) -> tuple[Any, Any]:
    return (
        described.get("linear_class", "bitlinear"),
        described.get("quantization_mode", "offline"),
    )


def is_packed(described: Mapping[str, Any]) -> bool:
    """Returns whether the linears are stored packed."""
    return described.get("quant_method") == QUANT_METHOD and _format(described)[1] == "offline"


def _open(
    unread: Mapping[str, weight_format.UnreadMatrix],
) -> dict[str, weight_format.StoredMatrix]:
    packed = {path: each for path, each in unread.items() if is_packed(each.description)}
    found = open_packed(packed)
    for path, stored in found.items():
        matrix, _, entries, description = unread[path]
        shape = packed_shape(matrix.output_dims, matrix.input_dims)
        read_scale = partial(scale_of, description)
        read = partial(repack, output_dims=matrix.output_dims)
        tensors = {
            "weight": weight_format.StoredTensor((shape,), (mx.uint8,), read),
            "scale": weight_format.StoredTensor(((1,), ()), FLOATS, read_scale),
        }
        if "bias" in matrix.layer and _scales_bias(description):
            scaled = partial(_scaled, entries["weight_scale"], read_scale)
            tensors["bias"] = weight_format.StoredTensor(((matrix.output_dims,),), FLOATS, scaled)
        found[path] = replace(stored, tensors=tensors)
    return found


def packed_shape(output_dims: int, input_dims: int) -> tuple[int, int]:
    """The shape of a packed weight."""
    return -(-output_dims // CODES_PER_BYTE), input_dims


def _scales_bias(described: Mapping[str, Any]) -> bool:
    """Returns whether a stored bias must still be multiplied by the scale."""
    return _format(described)[0] == "autobitlinear"


def scale_of(described: Mapping[str, Any], weight_scale: mx.array) -> mx.array:
    """The number that trits are multiplied by, float32 `(1,)`."""
    scale = weight_scale.astype(mx.float32).reshape(1)
    return 1.0 / scale if _format(described)[0] == "bitlinear" else scale


def _scaled(
    entry: TensorEntry, read_scale: Callable[[mx.array], mx.array], bias: mx.array
) -> mx.array:
    scale = read_scale(read_tensor(entry))
    return (bias.astype(mx.float32) * scale).astype(bias.dtype)


def _write(
    name: str, output_dims: int, input_dims: int, dtype: mx.Dtype
) -> weight_format.WrittenMatrix:
    """With a scale that multiplies. It stays float32, since any other dtype would round it."""
    specs = (
        TensorSpec(f"{name}.weight", mx.uint8, packed_shape(output_dims, input_dims)),
        TensorSpec(f"{name}.weight_scale", mx.float32, (1,)),
    )
    return weight_format.WrittenMatrix(specs, lambda words, scale: (pack(words, input_dims), scale))


def _describe_written(described: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(described or {}), "quantization_mode": "offline"}


def repack(weight: mx.array, output_dims: int) -> mx.array:
    """A packed weight in the layout of `ops.ternary`.

    Args:
        weight: `uint8` of shape `packed_shape(output_dims, input_dims)`.
        output_dims: The rows of the matrix.
    """
    packed = np.asarray(weight)
    rows, dims = packed.shape
    width = packed_width(dims)
    words, capacity = host_array((CODES_PER_BYTE * rows, width), mx.uint32)
    quarters = capacity.view(np.uint8).reshape(CODES_PER_BYTE, rows, -1)
    for part in blocks(rows, dims):
        codes = np.full((part.stop - part.start, CODES_PER_WORD * width), _PADDING, np.uint8)
        codes[:, :dims] = packed[part]
        fours = codes.view(np.uint32)
        for distance, mask in _SWAPS:
            differing = fours >> distance
            differing ^= fours
            differing &= mask
            fours ^= differing
            differing <<= distance
            fours ^= differing
        for number, quarter in enumerate(quarters[:, part]):
            quarter[...] = fours >> np.uint32(8 * number)
    return words[:output_dims]


def pack(weight: mx.array, input_dims: int) -> mx.array:
    """A weight in the layout of `ops.ternary`, packed as in BitNet checkpoints: the inverse of `repack`.

    Args:
        weight: `uint32` of shape `(N, packed_width(input_dims))`, N a multiple of 4.
        input_dims: The columns of the matrix.
    """
    rows = weight.shape[0]
    packed = mx.contiguous(weight).view(mx.uint8)[..., None]
    codes = (packed >> mx.arange(0, 8, 2, dtype=mx.uint8)) & 3
    codes = codes.reshape(CODES_PER_BYTE, rows // CODES_PER_BYTE, -1)[..., :input_dims]
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6


FORMAT = weight_format.WeightFormat(
    name=QUANT_METHOD,
    open=_open,
    own={"quant_method": QUANT_METHOD},
    check=check_format,
    covers=is_packed,
    write=_write,
    describe_written=_describe_written,
    rows=CODES_PER_BYTE,
    opens_in=("transformers",),
)
