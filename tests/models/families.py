"""Small models of families whose members must do everything, in the formats that are published."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from mlx_mmfree.hub import convert, open_checkpoint, save_model
from mlx_mmfree.hub.conversion.to_folder import FloatFormats, ternarize_groups
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.rotated import RotatedEmbedding, RotatedLinear
from mlx_mmfree.models import Decoder
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from mlx_mmfree.ops import hadamard
from tests.hub.checkpoints import GOLDENS, tiny_of

TOKENIZER = GOLDENS / "tokenizer_bpe"
BLOCK = 512
_WIDE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "linear_value_head_dim": 32,
    "head_dim": 32,
    "initializer_range": 0.06,
}


def in_floats(folder: Path, kind: str, **options: Any) -> None:
    """Writes a model with the weights in which it is trained."""
    save_model(folder, tiny_of(kind, vocab_size=518, **options), TOKENIZER)


def in_codes(folder: Path, kind: str, **options: Any) -> None:
    """Writes a model in MLX's affine format of 2 bits, ternary by group."""
    in_floats(folder.with_name("floats"), kind, **options)
    formats = FloatFormats(ternarize_groups=True)
    convert(open_checkpoint(folder.with_name("floats")), folder, formats=formats, check=False)


def rotate(model: Decoder) -> Decoder:
    """Rotates all matrices whose inputs are whole blocks, and makes them ternary by group."""
    signs: dict[int, mx.array] = {}
    layers = []
    for path, matrix in matrices(model).items():
        dims = matrix.input_dims
        is_gate = path.endswith(("beta_proj", "decay_proj"))
        if not matrix.is_plain or dims % BLOCK or is_gate:
            continue
        drawn = mx.where(mx.random.normal((dims,), key=mx.random.key(dims)) > 0, 1.0, -1.0)
        own = signs.setdefault(dims, drawn)
        made = RotatedEmbedding if matrix.is_embedding else RotatedLinear
        sizes = (matrix.output_dims, dims) if matrix.is_embedding else (dims, matrix.output_dims)
        layer = made(*sizes, group_size=128, bits=2, block=BLOCK)
        rows = hadamard(matrix.layer.weight.astype(mx.float32), BLOCK, own)
        layer.weight, layer.scales, layer.biases = ternarize_groups(rows.astype(mx.float16))
        layer.signs = own
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))
    mx.eval(model.parameters())
    return model


def in_rotated_codes(folder: Path, kind: str, **options: Any) -> None:
    save_model(folder, rotate(tiny_of(kind, vocab_size=518, **options)), TOKENIZER)


TERNARY = {"quantization_config": TernaryLinears().to_hub()}

FAMILIES: dict[str, Callable[[Path], None]] = {
    "Qwen3.5": partial(in_floats, kind="qwen3_5_text"),
    "ternary Qwen3.5": partial(in_floats, kind="qwen3_5_text", **TERNARY),
    "Qwen3.5 in codes": partial(in_codes, kind="qwen3_5_text", **_WIDE),
    "rotated Qwen3.5": partial(in_rotated_codes, kind="qwen3_5_text", **_WIDE),
}
"""A line for each; whatever stands here is tried by `test_everywhere.py`."""
