"""Unpacks ternary weights with five trits a byte as mlx-lm loads them.

mlx-lm runs this file from a model's folder (`--trust-remote-code`), and this file runs the model's own,
which lies beside it. Both need only mlx and mlx-lm. In memory, weights have MLX's affine 2-bit form.

Byte `j` of a row of `X.weight` holds the inputs `5 j` to `5 j + 4` as digits of base 3, the first one
lowest. A digit is a trit + 1. The weight is the trit times `X.weight_scale`.
"""

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx

MODELS = ("hgrn_bit.py", "hybrid.py", "ternary_transformer.py")
TRITS_PER_BYTE, LARGEST_BYTE = 5, 242
SCALE = ".weight_scale"


def model_beside() -> Any:
    """The module of the model's own file."""
    folder = Path(__file__).parent
    for name in MODELS:
        if (folder / name).exists():
            spec: Any = importlib.util.spec_from_file_location("custom_model_base", folder / name)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ValueError(f"'{folder}' must hold {' or '.join(MODELS)} but does not. Fetch it again.")


def two_bits(name: str, packed: mx.array, output_dims: int, input_dims: int) -> mx.array:
    """A matrix with 16 codes of 2 bits a word, whose rows are padded to a multiple of 32 inputs."""
    shape = output_dims, -(-input_dims // TRITS_PER_BYTE)
    if packed.shape != shape or packed.dtype != mx.uint8:
        raise ValueError(
            f"Tensor '{name}' must be uint8 of shape {shape} but is {packed.dtype} of shape "
            f"{packed.shape}. Fetch the model again."
        )
    if mx.any(packed > LARGEST_BYTE).item():
        raise ValueError(
            f"Tensor '{name}' must hold no byte above {LARGEST_BYTE} but does. Fetch the model again."
        )
    powers = mx.array([3**n for n in range(TRITS_PER_BYTE)], mx.uint8)
    codes = (packed[..., None] // powers % 3).reshape(output_dims, -1)[:, :input_dims]
    padding = mx.array(1, mx.uint8)
    codes = mx.pad(codes, [(0, 0), (0, -input_dims % 32)], constant_values=padding)
    shifts = mx.arange(0, 32, 2, dtype=mx.uint32)
    return (codes.reshape(output_dims, -1, 16).astype(mx.uint32) << shifts).sum(axis=-1)


def group_size_of(columns: int) -> int:
    """The largest group of MLX's form that divides a padded row."""
    return next(size for size in (128, 64, 32) if columns % size == 0)


def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The weights with every packed matrix in MLX's affine form, one after the other."""
    modules = dict(model.named_modules())
    dtype = weights["model.norm.weight"].dtype
    found = [name.removesuffix(SCALE) for name in weights if name.endswith(SCALE)]
    for path in found:
        scale = weights.pop(f"{path}{SCALE}").astype(dtype)
        name = f"{path}.weight"
        output_dims, input_dims = modules[path].weight.shape
        words = two_bits(name, weights.pop(name), output_dims, input_dims)
        columns = words.shape[1] * 16
        groups = output_dims, columns // group_size_of(columns)
        scales = mx.contiguous(mx.broadcast_to(scale, groups))
        # what is packed is dropped before the next matrix is read
        mx.eval(words, scales)
        weights |= {name: words, f"{path}.scales": scales, f"{path}.biases": -scales}
    return weights


base = model_beside()
ModelArgs = base.ModelArgs
Model = type("Model", (base.Model,), {"sanitize": sanitize})
