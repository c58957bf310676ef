"""Measurements: products of this library and others beside plain reads, and a training step.

The step has straight-through gradients, and is measured beside its matrix products alone in float32.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from random_models import random_head, random_packed

from mlx_mmfree.evaluation.benchmark import (
    READ,
    Limits,
    Record,
    computing_threads,
    in_turn,
    nested_arrays,
)
from mlx_mmfree.layers import PackedBitLinear, apply_head
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import find
from mlx_mmfree.ops import cross_entropy, long_mean
from mlx_mmfree.ops.backend.choice import stored_choices
from mlx_mmfree.ops.backend.dispatch import on_cpu
from mlx_mmfree.ops.inspection import metal_kernels
from mlx_mmfree.ops.kernel_times import read_seconds
from mlx_mmfree.platform.allocator import keep_freed_memory
from mlx_mmfree.platform.memory_reader import elapsed, memory_reader, queued_seconds

BLAS = "float32 products"
"""The limit of training: the same products in float32."""

TERNARY = "ternary"
"""The prefix of the names of this library's own products."""

# as in a model, a few products are queued together and share the overhead of an evaluation
_GROUP = 8
_WORDS_OF_A_ROW = 640
METHOD_OF_KERNELS = "the threads of the compiled kernels, each of which reads a contiguous share"
METHOD_ON_METAL = "a Metal kernel with the grid of a ternary product"


def measure_products(
    shapes: Sequence[Sequence[int]],
    rows: Sequence[int],
    heads: Sequence[Sequence[int]],
    head_bits: Sequence[int],
    walk_bytes: int,
    rounds: int,
) -> dict[str, Any]:
    """Measures products, including the quantisation of their input and the start of the threads.

    On a GPU, products of other libraries with the same shapes come beside the ternary ones, activations
    are bfloat16, and a measurement queues many products.

    Args:
        shapes: Output and input dims of ternary matrices.
        rows: Numbers of tokens multiplied at a time. One token is limited by a plain read,
            several by arithmetic.
        heads: Output and input dims of heads.
        head_bits: Bits of the heads' weights; 16 means bfloat16.
        walk_bytes: Smallest number of bytes of all copies of a matrix, so that each copy has left the
            caches when its turn comes.
        rounds: Number of measurements, after one that does not count.
    """
    keep_freed_memory()
    records = []
    with memory_reader() as reader:
        found = Limits(reader)
        notes = _limit_notes(found, walk_bytes, rounds)
        for product in _products(shapes, rows, heads, head_bits):
            first = product.make()
            copies = max(2, math.ceil(walk_bytes / first.weight.nbytes))
            layers = [first, *(product.make() for _ in range(copies - 1))]
            for count in product.rows:
                records.append(_measure(found, product, layers, count, rounds))
            del first, layers
    notes["chosen"] = {name: facts["chosen"] for name, facts in stored_choices().items()}
    # what a kernel's fault has slowed down is no measure of it
    notes["switched_off"] = {name: fault for name, fault in metal_kernels().items() if fault}
    return {"records": [asdict(record) for record in records], "notes": notes}


class _Product(NamedTuple):
    """The measured quantity.

    Attributes:
        name: What the names of its records begin with.
        weights: The number of weights of a matrix.
        input_dims: The number of inputs.
        rows: Numbers of tokens multiplied at a time.
        make: Makes a layer.
        apply: Applies a layer to rows of inputs.
    """

    name: str
    weights: int
    input_dims: int
    rows: Sequence[int]
    make: Callable[[], nn.Module]
    apply: Callable[[nn.Module, mx.array], mx.array]


def _products(
    shapes: Sequence[Sequence[int]],
    rows: Sequence[int],
    heads: Sequence[Sequence[int]],
    head_bits: Sequence[int],
) -> Iterator[_Product]:
    make: Callable[[], nn.Module]
    others = [] if on_cpu() else peers()
    for outputs, inputs in shapes:
        title, weights = f"{outputs} x {inputs}", outputs * inputs
        make = partial(_ternary, outputs, inputs, random_packed(outputs, inputs))
        yield _Product(f"{TERNARY} {title}", weights, inputs, rows, make, _call)
        for peer in others:
            make = partial(peer.make, outputs, inputs, _dtype())
            yield _Product(f"{peer.name} {title}", weights, inputs, rows, make, _call)
    for outputs, inputs in heads:
        for bits in head_bits:
            title = f"head {outputs} x {inputs}, {bits} bits"
            make = partial(random_head, outputs, inputs, bits, _dtype())
            yield _Product(title, outputs * inputs, inputs, (1,), make, apply_head)


def _limit_notes(found: Limits, walk_bytes: int, rounds: int) -> dict:
    rows = max(walk_bytes // 4 // _WORDS_OF_A_ROW, 1)
    buffer = mx.full((rows, _WORDS_OF_A_ROW), 1, mx.uint32)
    plain = [found.read_seconds([buffer]) for _ in range(rounds + 1)][1:]
    notes = {
        "bytes_per_second": buffer.nbytes / min(plain),
        "macs_per_second": found.multiply_rate(),
        "read_method": _read_method(found),
        "arithmetic": found.arithmetic,
    }
    missing = None if on_cpu() else mlx_lm_missing()
    return notes if missing is None else notes | {"left_out": {"MLX LM": missing}}


def _read_method(found: Limits) -> str:
    """How memory is read, as text."""
    if read_seconds([]) is None:
        return found.reader.method
    return METHOD_OF_KERNELS if on_cpu() else METHOD_ON_METAL


def _measure(
    found: Limits, product: _Product, layers: Sequence[nn.Module], rows: int, rounds: int
) -> Record:
    x = mx.random.normal((rows, product.input_dims)).astype(_dtype())
    mx.eval(x)
    rate = found.multiply_rate() if rows > 1 else None

    def limit_seconds() -> float:
        if rate is not None:
            return product.weights * rows / (found.multiply_rate() or rate)
        arrays = [array for layer in layers for array in nested_arrays(layer)]
        return found.read_seconds(arrays) / len(layers)

    seconds = in_turn(
        rounds, limit_seconds, lambda: _seconds(product.apply, layers, x) / len(layers)
    )
    return Record(
        f"{product.name}, {_rows(rows)}",
        threads=found.threads,
        limit=READ if rate is None else found.arithmetic,
        bytes=sum(array.nbytes for array in nested_arrays(layers[0])),
        macs=product.weights * rows,
        **seconds,
        unit="rows",
        count=rows,
    )


def _seconds(
    apply: Callable[[nn.Module, mx.array], mx.array], layers: Sequence[nn.Module], x: mx.array
) -> float:
    """The seconds that all layers take together."""
    if not on_cpu():
        return queued_seconds(lambda: [apply(layer, x) for layer in layers])

    def apply_all() -> None:
        for first in range(0, len(layers), _GROUP):
            mx.eval([apply(layer, x) for layer in layers[first : first + _GROUP]])

    return elapsed(apply_all)


def _dtype() -> mx.Dtype:
    """The dtype of activations: on a GPU the one of published checkpoints."""
    return mx.float32 if on_cpu() else mx.bfloat16


def _call(layer: nn.Module, x: mx.array) -> mx.array:
    y: mx.array = layer(x)
    return y


def _ternary(outputs: int, inputs: int, weight: mx.array) -> PackedBitLinear:
    layer = PackedBitLinear(inputs, outputs)
    layer.weight = mx.bitwise_or(weight, mx.array(0, weight.dtype))
    mx.eval(layer.parameters())
    return layer


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


Factors = tuple[mx.array, mx.array]


def measure_training(
    name: str, config: Mapping[str, Any], batch_size: int, length: int, rounds: int
) -> dict[str, Any]:
    """Measures the loss and gradients of one batch, in turn with its matrix products alone.

    Args:
        name: Name to show with the result.
        config: Configuration, as in a `config.json` of the Hub. The float weights are random.
        batch_size: Number of sequences in the batch.
        length: Number of tokens in a sequence.
        rounds: Number of measurements, after one that does not count.
    """
    keep_freed_memory()
    architecture = find(config["model_type"])
    model = architecture.build(architecture.config.from_hub(config))
    mx.eval(model.parameters())
    tokens = mx.random.randint(0, model.vocab_size, (batch_size, length + 1))
    step = nn.value_and_grad(model, mean_loss)
    products, macs = _training_products(model, batch_size * length)
    seconds = in_turn(
        rounds,
        lambda: elapsed(lambda: mx.eval([a @ b for a, b in products])),
        lambda: elapsed(lambda: mx.eval(step(model, tokens))),
    )
    record = Record(
        f"{name}: training step",
        threads=computing_threads(),
        limit=BLAS,
        bytes=0,
        macs=macs,
        **seconds,
        unit="tokens",
        count=batch_size * length,
    )
    return {"records": [asdict(record)], "notes": {}}


def mean_loss(model: nn.Module, tokens: mx.array) -> mx.array:
    """The mean cross-entropy of the next token in rows of token ids `(B, L + 1)`."""
    logits, _ = model(tokens[:, :-1])
    return long_mean(cross_entropy(logits, tokens[:, 1:]))


def _training_products(model: nn.Module, rows: int) -> tuple[list[Factors], int]:
    """The factors of the forward and both backward products of each linear layer, and their cost."""
    pairs: list[Factors] = []
    macs = 0
    for matrix in matrices(model).values():
        if not matrix.holds_floats or matrix.is_embedding:
            continue
        weight = matrix.layer.weight.astype(mx.float32)
        outputs, inputs = weight.shape
        x, dy = mx.random.normal((rows, inputs)), mx.random.normal((rows, outputs))
        mx.eval(x, dy, weight)
        pairs += [(x, weight.T), (dy, weight), (dy.T, x)]
        macs += 3 * rows * outputs * inputs
    return pairs, macs


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
