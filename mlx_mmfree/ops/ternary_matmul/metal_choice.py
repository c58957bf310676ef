"""The ways in which Metal can compute a ternary product, and which of them come into question.

- `groups`: our kernel for groups of up to 8 rows, each of which reads the packed words again
- `tiles`: our kernel for tiles of 64 rows and 64 outputs
- `mlx`: `mx.quantized_matmul`

Which one is fastest is timed, see `backend.choice`. Two are left out by counts. Tiles compute 64 rows
whatever their number, so for up to 16 rows they would compute at least four times as many products as
there are. Groups decode each word again for 8 rows, so for more than 64 rows they would do so 9 times.
"""

from bisect import bisect_left
from typing import Any

from ..backend import launch

GROUPS, TILES, MLX = "groups", "tiles", "mlx"

_CLASSES_OF_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512)
MOST_TIMED_ROWS = _CLASSES_OF_ROWS[-1]
_MOST_IN_GROUPS = 64
_FEWEST_IN_TILES = 17


def candidates(rows: int) -> list[str]:
    """The names of the ways for a number of rows, the default first."""
    names = [TILES, GROUPS, MLX] if rows > launch.FEW_ROWS else [GROUPS, TILES, MLX]
    if rows > _MOST_IN_GROUPS:
        names.remove(GROUPS)
    if rows < _FEWEST_IN_TILES:
        names.remove(TILES)
    return names


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
