"""The arguments of a launch of `mlgru_step` that are not arrays."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from . import Options


class Form(NamedTuple):
    """What selects the code of a kernel, and the epsilon."""

    eps: float
    is_bounded: bool
    is_masked: bool
    has_starts: bool

    @classmethod
    def of(cls, options: Options) -> "Form":
        eps, *arrays = options
        return cls(eps, *(array is not None for array in arrays))

    def nested(self, arrays: Sequence[mx.array]) -> tuple[list[mx.array], Options]:
        """The arguments of a call, from its arrays."""
        first, rest = list(arrays[:3]), list(arrays[3:])
        optional = [rest.pop(0) if is_given else None for is_given in self[1:]]
        return first, Options(self.eps, *optional)
