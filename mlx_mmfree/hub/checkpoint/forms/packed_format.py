"""This library's packed form of a checkpoint on disk.

Names and `config.json` are those of the architecture on the Hub, with two differences.

- Each ternary linear `X` has `X.weight`, `uint32` in the layout of `ops.ternary`, and `X.weight_scale`,
  float32 of shape `(1,)`. In that layout a word holds 16 neighbouring inputs, the first in the lowest
  bits, `code = trit + 1`, and rows are padded to a multiple of 32 inputs with code 1. The weight is
  `trit * weight_scale`. If `linear_class` is `linear`, activations stay floats. Then `weight_scale` may
  have one number for each row, and the weight is also multiplied by `X.input_scale`, float32, which has
  one number for each column.
- `config.json` has the `quantization_config` of `describe_packing`.

With `trits_per_byte`, weights have the form of `forms.five_trits`.

mlx-lm can read the folders that `convert` writes. In these, `X.scales` and `X.biases` repeat the scale
in MLX's affine form, rounded to the dtype of the model. `config.json` has `quantization` too, and the
exact scales are in a file of their own, which mlx-lm does not read. With `trits_per_byte`, there are no
such copies: the model's Python file makes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ....errors import UnsupportedModelError
from ....ops.host_blocks import has_code_three
from ....ops.ternary import CODES_PER_WORD
from . import affine_format, bitnet_format, five_trits

QUANT_METHOD = "mmfree"
FORMAT_VERSION = 1
TRITS_KEY = "trits_per_byte"
PACKED_DTYPES = (mx.uint8, mx.uint32)
"""The dtypes of packed weights, in this form and in the others that are read."""

WRITER_KEY = "mlx_mmfree"
"""The key under which `config.json` describes its writer, see `hub.checkpoint.checkpoint`."""

_ROTATION_MARKS = ("hadamard", "rotation", "rotated", "walsh")


def describe_packing(
    described: Mapping[str, Any] | None = None,
    *,
    is_dense: bool = False,
    has_five_trits: bool = False,
) -> dict[str, Any]:
    """The value of `quantization_config`.

    Args:
        described: The value for the checkpoint with float master weights. What it says about the
            mathematics of the linears stays.
        is_dense: Whether the linears are those of a dense model, whose activations stay floats.
        has_five_trits: Whether weights have five trits a byte.
    """
    stored = {"linear_class", "quantization_mode", TRITS_KEY}
    kept = {key: value for key, value in (described or {}).items() if key not in stored}
    if is_dense:
        kept["linear_class"] = "linear"
    own: dict[str, Any] = {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION}
    if has_five_trits:
        # other bits, so that versions that do not know the form refuse it
        return {**kept, **own, "bits": five_trits.BITS, TRITS_KEY: five_trits.TRITS_PER_BYTE}
    return {**kept, **own, "bits": 2}


def has_five_trits(described: Any) -> bool:
    """Whether a `quantization_config`, which may be anything, says that bytes have five trits."""
    is_own = isinstance(described, Mapping) and described.get("quant_method") == QUANT_METHOD
    return is_own and TRITS_KEY in described


def check_packing(config: Mapping[str, Any], methods: Sequence[str]) -> None:
    """Refuses a checkpoint that is quantised in a way that is not read.

    Args:
        config: The content of `config.json`.
        methods: The values of `quant_method` that the architecture reads.

    Raises:
        UnsupportedModelError: The checkpoint has another method or other bits, or a newer version of
            this form.
    """
    _refuse_rotated(config)
    quantization, described = config.get("quantization"), config.get("quantization_config")
    method = described.get("quant_method") if isinstance(described, Mapping) else None
    is_read = method == QUANT_METHOD or affine_format.METHOD in methods
    if quantization is not None and not is_read:
        raise UnsupportedModelError(
            "[config.json] 'quantization' must be absent for this architecture but is given. Load "
            "the checkpoint that it was made from."
        )
    if quantization is not None:
        affine_format.check_form(quantization)
    if described is None or affine_format.is_copy(described, quantization):
        return
    if method in methods and method == bitnet_format.QUANT_METHOD:
        bitnet_format.check_form(described)
        return
    own = describe_packing(has_five_trits=has_five_trits(described))
    if method is None or {key: described.get(key) for key in own} != own:
        others = "".join(
            f", with 'quant_method' {name}" for name in methods if name != QUANT_METHOD
        )
        raise UnsupportedModelError(
            f"[config.json] 'quantization_config' must be {own}{others}, or absent for this "
            f"architecture but got {described!r:.200}. Load the checkpoint that it was made from."
        )


def _refuse_rotated(config: Mapping[str, Any]) -> None:
    """Refuses weights in a rotated basis, which would need the same rotation of the activations."""
    quantization = config.get("quantization")
    keys = [*config, *(quantization if isinstance(quantization, Mapping) else ())]
    rotated = [key for key in keys if any(mark in key.lower() for mark in _ROTATION_MARKS)]
    if rotated:
        raise UnsupportedModelError(
            f"[config.json] {rotated[0]!r:.80} must be absent: weights in a rotated basis, as those "
            "of Ternary Bonsai 2, are not read. Use a checkpoint of the first generation."
        )


def has_valid_codes(weight: mx.array, input_dims: int) -> bool:
    """Whether packed words hold only the codes 0 to 2, and code 1 in the padding."""
    if has_code_three(weight):
        return False
    shifts = mx.arange(0, 2 * CODES_PER_WORD, 2, dtype=mx.uint32)
    first_padded = input_dims // CODES_PER_WORD
    tail = mx.bitwise_and(weight[:, first_padded:, None] >> shifts, 3)
    padding = tail.reshape(weight.shape[0], -1)[:, input_dims % CODES_PER_WORD :]
    return bool(mx.all(padding == 1).item())
