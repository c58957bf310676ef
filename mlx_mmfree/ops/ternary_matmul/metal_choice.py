"""The ways in which Metal can compute a ternary product, and which of them come into question.

- `groups`: our kernel for groups of up to 4 rows, each of which reads the packed words again
- `tiles`: our kernel for tiles of 64 rows and 64 outputs
- `split`: the same for tiles of 32 rows and 32 outputs, each computed in parts of the inputs
- `mlx`: `mx.quantized_matmul`

Which one is fastest is timed, see `backend.choice`, but for four that counts leave out:

- For up to 8 rows, groups read each word once or twice, in one launch with all around the product.
  MLX's own product takes launches for codes and scales beside its own, more instructions a weight and
  row, and reads a quarter more: two floats for 128 weights.
- Tiles compute 64 rows whatever their number, and groups of 4 take up to 9 instructions for 4 products,
  so that tiles take more up to 32 rows, see `tests/ops/test_machine_code.py`.
- Groups decode each word again for 4 rows, for more than 64 rows at least 17 times.
- Where tiles fill a GPU, split inputs gain nothing, and decode each word for 32 rows instead of 64.
"""

from bisect import bisect_left
from typing import Any

from ..backend import launch
from .metal_tiles import UNDIVIDED, tile

GROUPS, TILES, SPLIT, MLX = "groups", "tiles", "split", "mlx"

FILLING_TILES = 128
"""How many tiles are taken to fill a GPU. They are 12 SIMD groups for each of 40 cores, or 6 for each of
80. A core computes 4 at a time, and others while these wait for memory."""

FEWEST_SPLIT_INPUTS = 512
"""The fewest inputs that are split: with 4 steps for each of 8 parts, adding these up takes little."""

_CLASSES_OF_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512)
MOST_TIMED_ROWS = _CLASSES_OF_ROWS[-1]
_MOST_IN_ONE_LAUNCH = 8
_MOST_IN_GROUPS = 64
_FEWEST_IN_TILES = 33


def is_worth_splitting(rows: int, dims: int, outputs: int) -> bool:
    """Whether the tiles of a product leave a part of a GPU idle, and each has many inputs to sum."""
    side = tile(UNDIVIDED)
    are_few = -(-rows // side) * -(-outputs // side) < FILLING_TILES
    return rows >= _FEWEST_IN_TILES and are_few and dims >= FEWEST_SPLIT_INPUTS


def candidates(
    rows: int, dims: int, outputs: int, *, mlx_is_exact: bool
) -> tuple[list[str], list[str]]:
    """The names of the ways that are timed, the default first, and of the others.

    Args:
        rows, dims, outputs: The shape.
        mlx_is_exact: Whether MLX's product is as exact as the others.
    """
    default = GROUPS if rows <= launch.FEW_ROWS else TILES
    is_timed = {
        GROUPS: rows <= _MOST_IN_GROUPS,
        TILES: rows >= _FEWEST_IN_TILES,
        SPLIT: is_worth_splitting(rows, dims, outputs),
        MLX: rows > _MOST_IN_ONE_LAUNCH and mlx_is_exact,
    }
    timed = sorted((name for name in is_timed if is_timed[name]), key=lambda name: name != default)
    others = [name for name in is_timed if name not in timed and (name != MLX or mlx_is_exact)]
    return timed, others


def shape_class(rows: int, dims: int, outputs: int) -> dict[str, Any]:
    """The shapes that share a choice: rows up to one of some numbers, sizes between powers of 2.

    Those for which split inputs come into question share none with others.
    """
    at = bisect_left(_CLASSES_OF_ROWS, rows)
    return {
        "rows": _CLASSES_OF_ROWS[min(at, len(_CLASSES_OF_ROWS) - 1)],
        "inputs_below": 1 << dims.bit_length(),
        "outputs_below": 1 << outputs.bit_length(),
        "may_split": is_worth_splitting(rows, dims, outputs),
    }


def timed_shape(rows: int, dims: int, outputs: int) -> dict[str, Any]:
    """The shape that is timed, as it is kept."""
    return {"rows": min(rows, MOST_TIMED_ROWS), "inputs": dims, "outputs": outputs}
