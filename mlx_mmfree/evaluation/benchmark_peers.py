"""Products of other libraries with the same shapes, to measure beside ternary ones on a GPU."""

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .benchmark_weights import random_head

MLX_BITS = (2, 4)
_MLX_LM_FILE = Path("models", "bitlinear_layers.py")


class Peer(NamedTuple):
    """A layer of another library.

    Attributes:
        name: Its name in the results.
        make: Makes a layer with random weights of its output dims, input dims and activation dtype.
    """

    name: str
    make: Callable[[int, int, mx.Dtype], nn.Module]


def peers() -> list[Peer]:
    """MLX's products of quantised weights, and mlx-lm's product of ternary ones if it is installed."""
    found = [Peer(f"MLX {bits}-bit", _mlx_layer(bits)) for bits in MLX_BITS]
    return [*found, Peer("MLX LM BitNet", _mlx_lm_layer)] if mlx_lm_missing() is None else found


def mlx_lm_missing() -> str | None:
    """Why mlx-lm's product cannot be measured, or `None`."""
    try:
        _mlx_lm_module()
    except (ImportError, OSError) as error:
        return str(error)
    return None


@cache
def _mlx_lm_module() -> ModuleType:
    """The file of mlx-lm that holds the layer, without the packages that importing mlx-lm takes."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None or not package.submodule_search_locations:
        raise ImportError("mlx-lm is not installed")
    file = Path(package.submodule_search_locations[0]) / _MLX_LM_FILE
    name = f"mlx_lm.{'.'.join(_MLX_LM_FILE.with_suffix('').parts)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"mlx-lm has no file '{_MLX_LM_FILE}'")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _mlx_layer(bits: int) -> Callable[[int, int, mx.Dtype], nn.Module]:
    return lambda outputs, inputs, dtype: random_head(outputs, inputs, bits, dtype)


def _mlx_lm_layer(outputs: int, inputs: int, dtype: mx.Dtype) -> nn.Module:
    layer: nn.Module = _mlx_lm_module().BitLinear(inputs, outputs, bias=False)
    # each layer has memory of its own
    layer.weight = mx.bitwise_or(_codes(*layer.weight.shape), mx.array(0, mx.uint8))
    layer.weight_scale = mx.full((1,), inputs**-0.5, dtype)
    mx.eval(layer.weight, layer.weight_scale)
    return layer


@cache
def _codes(rows: int, columns: int) -> mx.array:
    """Bytes of four random codes from 0 to 2."""
    codes = np.random.default_rng(0).integers(0, 3, (rows, columns, 4), dtype=np.uint8)
    return mx.array(codes @ np.array([1, 4, 16, 64], np.uint8))
