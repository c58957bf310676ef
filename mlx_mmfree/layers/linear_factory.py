"""What makes the projections of a mixer."""

from collections.abc import Callable, Mapping

import mlx.nn as nn

LinearFactory = Callable[..., nn.Module]
"""Makes a projection: called as `linear(input_dims, output_dims, bias=...)`."""

Linears = LinearFactory | Mapping[str, LinearFactory]
"""Makes all projections of a mixer, or each by its name."""


def factory_of(linears: Linears, name: str) -> LinearFactory:
    """What makes the projection of this name."""
    return linears[name] if isinstance(linears, Mapping) else linears
