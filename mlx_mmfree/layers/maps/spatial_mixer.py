"""The interface that every spatial mixer follows."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..arguments import check_features


class SpatialMixer(nn.Module):
    """A module that mixes the places of a map: maps `(B, H, W, D)` to the same shape.

    It is made as `Mixer(dims, *, ..., linear=nn.Linear)` and takes maps of any height and width.

    Attributes:
        equation: What it computes, in a line.
        complexity: Multiplications for a map of `T` places of `D` dims.
        paper: Where it was published.
    """

    equation: ClassVar[str] = ""
    complexity: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __call__(self, x: mx.array) -> mx.array:
        raise NotImplementedError


def check_map(place: str, x: mx.array, dims: int) -> None:
    """Refuses an input of a spatial mixer that is no map of `dims` floats with at least one place.

    Raises:
        TypeError: It holds no floats.
        ValueError: It has another number of axes, another size, or no places.
    """
    if x.ndim != 4:
        way_out = " Add a batch axis: x[None]." if x.ndim == 3 else ""
        raise ValueError(
            f"[{place}] 'x' must have the four axes (batch, height, width, dims) but got shape "
            f"{x.shape}.{way_out}"
        )
    check_features(place, x, dims)
    if 0 in x.shape[1:3]:
        raise ValueError(f"[{place}] 'x' must have at least one place but got shape {x.shape}.")
