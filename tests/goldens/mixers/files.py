"""Golden files of single mixers: what third-party code computes from given weights and inputs."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

T = TypeVar("T", bound=Callable[..., None])


@dataclass(frozen=True)
class GoldenFile:
    """One file: weights, inputs and outputs by their names after `w.`, `in.`, `out.` and `aux.`.

    Attributes:
        weights: The weights.
        inputs: The inputs; masks are booleans.
        out: What the third party computed.
        aux: Intermediate values.
        hyper: Sizes and options.
    """

    weights: dict[str, mx.array]
    inputs: dict[str, mx.array]
    out: dict[str, mx.array]
    aux: dict[str, mx.array]
    hyper: dict[str, Any]


@cache
def read(path: Path) -> GoldenFile:
    tensors, metadata = cast(
        "tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True)
    )
    tensors = {
        name: value.astype(mx.bool_) if value.dtype == mx.uint8 else value
        for name, value in tensors.items()
    }
    parts = [
        {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
        for prefix in ("w.", "in.", "out.", "aux.")
    ]
    return GoldenFile(*parts, json.loads(metadata["hyper"]))


@cache
def name_of(path: Path) -> str:
    """Its contents, whatever its seed and sizes."""
    metadata = cast("dict[str, str]", mx.load(str(path), return_metadata=True)[1])
    return metadata["golden"]


_compared: set[str] = set()


def golden(*names: str) -> Callable[[T], T]:
    """A test of these files, which it takes one by one as `file`."""
    _compared.update(names)
    return pytest.mark.golden(*names)


def compared_names() -> set[str]:
    """The names of all files with which some test of this folder compares."""
    for file in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.goldens.mixers.{file.stem}")
    return _compared


def check_options(options: dict[str, Any], *mapped: str) -> None:
    """Fails by its name for an option of a file that its test does not hand on. Texts only describe."""
    unmapped = [
        name for name, value in options.items() if name not in mapped and not isinstance(value, str)
    ]
    assert not unmapped, f"the test of this file does not hand on {', '.join(unmapped)}"


def assert_close(got: mx.array, want: mx.array, tolerance: float = 1e-5) -> None:
    r"""Asserts :math:`|got - want| \le 10^{-5} \max(1, \max |want|)`."""
    assert got.shape == want.shape
    a, b = np.array(got.astype(mx.float32)), np.array(want.astype(mx.float32))
    limit = tolerance * max(1.0, float(np.abs(b).max(initial=0.0)))
    # not "<=" of the maximum alone, which NaN would pass
    assert np.isfinite(a).all() and float(np.abs(a - b).max(initial=0.0)) <= limit


def fill(module: nn.Module, weights: dict[str, mx.array], names: dict[str, str]) -> None:
    """Gives the named parts of a module the weights, and the biases if there are any, of the file."""
    for ours, theirs in names.items():
        module[ours].weight = weights[f"{theirs}.weight"]
        if f"{theirs}.bias" in weights:
            module[ours].bias = weights[f"{theirs}.bias"]


def heads_apart(x: mx.array, heads: int) -> mx.array:
    """`(B, T, H * K)` as `(B, H, T, K)`."""
    return mx.unflatten(x, -1, (heads, -1)).swapaxes(1, 2)


def heads_together(x: mx.array) -> mx.array:
    """`(B, H, T, K)` as `(B, T, H * K)`."""
    return mx.flatten(x.swapaxes(1, 2), 2)
