"""Runs a packed model on the activation codes of other code, to compare everything between them.

A code whose scaled value lies beside a rounding boundary may fall to either side of it, and what it
moves grows from layer to layer. With the codes given, two implementations have to agree in float32; and
each code of ours that differs from the one given has to lie beside a boundary.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops.backend.dispatch import Operation
from tests.tolerances import TOLERANCE, relative_error

Codes = tuple[np.ndarray, np.ndarray]

BOUNDARY = 1e-3
"""How near to a rounding boundary, in steps, a code may be a neighbouring one."""


def force(monkeypatch: pytest.MonkeyPatch, given: Iterable[Codes], one_code: float) -> None:
    """Gives the quantisations of a packed model these results from now on, in the order of its work.

    The definition of `bit_linear` computes with them. The backend that users have is held against the
    definition on each input, where it chooses its codes itself.

    Args:
        monkeypatch: Undoes it.
        given: For each quantisation the codes `(L, D)` and the scale `(L, 1)` that they divide by.
        one_code: How much of a result one code beside a boundary may move.
    """
    definition = import_module("mlx_mmfree.ops.bit_linear.definition")
    quantize, usual, left = definition.rms_norm_quantize, Operation.__call__, iter(given)

    def forced_codes(
        x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
    ) -> tuple[mx.array, mx.array]:
        own, scale = quantize(x, weight, eps=eps, rounding=rounding)
        codes, codes_scale = (mx.array(np.float32(values))[None] for values in next(left))
        assert relative_error(scale, codes_scale) <= TOLERANCE[mx.float32]
        y = x if eps is None else mx.fast.rms_norm(x, weight, eps)
        scaled = np.array(y, np.float64) * np.array(scale, np.float64)
        differ = np.array(own != codes)
        distance = np.abs(scaled - np.floor(scaled) - 0.5)[differ]
        assert (distance <= BOUNDARY).all()
        assert mx.abs(own - codes).max().item() <= 1
        return codes, codes_scale

    def forced(self: Operation, *args: Any, **kwargs: Any) -> Any:
        if self.name != "bit_linear":
            return usual(self, *args, **kwargs)
        with monkeypatch.context() as own:
            own.setattr(definition, "rms_norm_quantize", quantize)
            free = definition.reference(*args, **kwargs)
        assert relative_error(usual(self, *args, **kwargs), free) <= one_code
        return definition.reference(*args, **kwargs)

    monkeypatch.setattr(definition, "rms_norm_quantize", forced_codes)
    monkeypatch.setattr(Operation, "__call__", forced)
