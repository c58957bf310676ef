"""The ways in which Metal can compute a ternary product, and which of them come into question.

- `groups`: our kernel for groups of up to 8 rows, each of which reads the packed words again
- `tiles`: our kernel for tiles of 64 rows and 64 outputs
- `mlx`: `mx.quantized_matmul`

Which one is fastest is timed, see `backend.choice`, but for three that counts leave out:

- For up to 8 rows, groups read each word once, in one launch with all around the product. MLX's own
  product takes launches for codes and scales beside its own, and reads a quarter more: two floats for
  128 weights.
- Tiles compute 64 rows whatever their number, and groups of 8 take 11 instructions for 8 products, so
  that tiles take more up to 32 rows, see `tests/ops/test_machine_code.py`.
- Groups decode each word again for 8 rows, for more than 64 rows at least 9 times.
"""

from bisect import bisect_left
from typing import Any

from ..backend import launch

GROUPS, TILES, MLX = "groups", "tiles", "mlx"

_CLASSES_OF_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512)
MOST_TIMED_ROWS = _CLASSES_OF_ROWS[-1]
_MOST_IN_GROUPS = 64
_FEWEST_IN_TILES = 33


def candidates(rows: int, are_exact: bool) -> tuple[list[str], list[str]]:
    """The names of the ways that are timed, the default first, and of the others.

    Args:
        rows: The number of rows.
        are_exact: Whether MLX's product is as exact as the others.
    """
    default = GROUPS if rows <= launch.FEW_ROWS else TILES
    is_timed = {
        GROUPS: rows <= _MOST_IN_GROUPS,
        TILES: rows >= _FEWEST_IN_TILES,
        MLX: rows > launch.MAX_GROUP_ROWS and are_exact,
    }
    timed = sorted((name for name in is_timed if is_timed[name]), key=lambda name: name != default)
    others = [name for name in is_timed if name not in timed and (name != MLX or are_exact)]
    return timed, others


def shape_class(rows: int, dims: int, outputs: int) -> dict[str, Any]:
    """The shapes that share a choice: rows up to one of some numbers, sizes between powers of 2."""
    at = bisect_left(_CLASSES_OF_ROWS, rows)
    return {
        "rows": _CLASSES_OF_ROWS[min(at, len(_CLASSES_OF_ROWS) - 1)],
        "inputs_below": 1 << dims.bit_length(),
        "outputs_below": 1 << outputs.bit_length(),
    }


def timed_shape(rows: int, dims: int, outputs: int) -> dict[str, Any]:
    """The shape that is timed, as it is kept."""
    return {"rows": min(rows, MOST_TIMED_ROWS), "inputs": dims, "outputs": outputs}
