"""Single operations against the reference kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.files.gguf_blocks import (
    TYPES,
    code_scales,
    code_words,
    dequantized,
    encode,
)
from mlx_mmfree.hub.checkpoint.formats import bitnet
from mlx_mmfree.layers import BitLinear, PackedBitLinear
from mlx_mmfree.layers.attention.positions import llama3_wavelengths, rope_wavelengths
from mlx_mmfree.models import find
from mlx_mmfree.ops import (
    AffineFormat,
    dense_matmul,
    hadamard,
    linear_scan,
    pack_ternary,
    rms_norm_quantize,
    ternarize,
)
from mlx_mmfree.ops.activations import silu
from mlx_mmfree.token_mixers import MLGRU
from tests.goldens.cases import golden
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
EPS = 1e-6
Tensors = dict[str, mx.array]


@pytest.fixture
def tensors(ops_folder: Path) -> Tensors:
    return golden(ops_folder)


def check_gradients(
    function: Callable[..., mx.array],
    arguments: list[mx.array],
    output_gradient: mx.array,
    wanted: list[mx.array],
) -> None:
    """The gradients of every argument."""

    def total(*args: mx.array) -> mx.array:
        return (function(*args) * output_gradient).sum()

    gradients = mx.grad(total, argnums=list(range(len(arguments))))(*arguments)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert relative_error(gradient, want) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("weight", [None, "norm_weight"])
def test_fused_quantisation_row_by_row(tensors: Tensors, weight: str | None) -> None:
    norm_weight = None if weight is None else tensors[f"fused_quant.{weight}"]
    codes, scale = rms_norm_quantize(
        tensors["fused_quant.x"], norm_weight, eps=EPS, rounding="half_away"
    )
    wanted = tensors["fused_quant.y_unit_weight" if weight is None else "fused_quant.y"]
    # rows have very different sizes, and one code of one row must not be off
    for got, want in zip(codes / scale, wanted, strict=True):
        assert relative_error(got, want) <= FLOAT32


def test_fused_bit_linear(tensors: Tensors) -> None:
    op: dict[str, mx.array] = {
        name.removeprefix("fused_bitlinear."): x
        for name, x in tensors.items()
        if name.startswith("fused_bitlinear.")
    }
    layer = BitLinear(64, 24, norm_eps=EPS, rounding="half_away")

    def apply(x: mx.array, weight: mx.array, norm_weight: mx.array) -> mx.array:
        layer.weight, layer.norm.weight = weight, norm_weight
        return layer(x)

    arguments = [op["x"], op["weight"], op["norm_weight"]]
    y = apply(*arguments)
    for got, want in zip(y, op["y"], strict=True):
        assert relative_error(got, want) <= FLOAT32
    wanted = [op["dx"], op["dweight"], op["dnorm_weight"]]
    check_gradients(apply, arguments, op["dy"], wanted)
    apply(*arguments)
    assert mx.array_equal(layer.to_packed()(op["x"]), y)


@pytest.mark.parametrize("prefix", ["", "tie_"])
def test_weight_quantisation(tensors: Tensors, prefix: str) -> None:
    want = tensors[f"weight_quant.{prefix}q"]
    trits, scale = ternarize(tensors[f"weight_quant.{prefix}w"])
    assert mx.array_equal(trits, mx.sign(want))
    assert relative_error(trits * scale, want) <= FLOAT32


def test_gated_norm(tensors: Tensors) -> None:
    def apply(x: mx.array, gate: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, EPS) * silu(gate)

    arguments = [tensors[f"gated_norm.{name}"] for name in ("x", "gate", "weight")]
    assert relative_error(apply(*arguments), tensors["gated_norm.y"]) <= FLOAT32
    wanted = [tensors[f"gated_norm.{name}"] for name in ("dx", "dgate", "dweight")]
    check_gradients(apply, arguments, tensors["gated_norm.dy"], wanted)


def test_norm_of_residual_sum(tensors: Tensors) -> None:
    total = tensors["rmsnorm_residual.x"] + tensors["rmsnorm_residual.residual"]
    assert relative_error(total, tensors["rmsnorm_residual.residual_out"]) <= FLOAT32
    norm = nn.RMSNorm(total.shape[-1], eps=EPS)
    norm.weight = tensors["rmsnorm_residual.weight"]
    assert relative_error(norm(total), tensors["rmsnorm_residual.y"]) <= FLOAT32


def test_swiglu(tensors: Tensors) -> None:
    def apply(x: mx.array, y: mx.array) -> mx.array:
        return silu(x) * y

    arguments = [tensors["swiglu.x"], tensors["swiglu.y"]]
    assert relative_error(apply(*arguments), tensors["swiglu.z"]) <= FLOAT32
    wanted = [tensors["swiglu.dx"], tensors["swiglu.dy"]]
    check_gradients(apply, arguments, tensors["swiglu.dz"], wanted)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_recurrence(tensors: Tensors, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, length, dims = tensors["recurrence.x"].shape
    rows = {
        name: tensors[f"recurrence.{name}"].reshape(batch * heads, length, dims)
        for name in ("x", "f", "o", "do", "dx", "df")
    }
    first, last = (
        tensors[f"recurrence.{name}"].reshape(batch * heads, dims) for name in ("h0", "hT")
    )
    if backend is not None:
        monkeypatch.setenv("MLX_MMFREE_BACKEND", backend)
    states, state = linear_scan(rows["f"], rows["x"], first)
    assert relative_error(states, rows["o"]) <= FLOAT32
    assert relative_error(state, last) <= FLOAT32
    check_gradients(
        lambda f, x: linear_scan(f, x, first)[0],
        [rows["f"], rows["x"]],
        rows["do"],
        [rows["df"], rows["dx"]],
    )


def test_lower_bounds(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    table, want = tensors["lower_bounds.param"], tensors["lower_bounds.value"]
    architecture = find("hgrn_bit")
    layers, dims = table.shape
    model = architecture.build(
        architecture.config(
            vocab_size=4, hidden_size=dims, num_hidden_layers=layers, intermediate_size=8
        )
    )
    model.lower_bounds = table
    bounds: list[mx.array] = []
    call = MLGRU.between

    def record(self: MLGRU, *args: Any, **kwargs: Any) -> Any:
        bound = kwargs.get("lower_bound")
        bounds.append(mx.zeros(dims) if bound is None else bound)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(MLGRU, "between", record)
    model(mx.zeros((1, 1), mx.int32))
    assert relative_error(mx.stack(bounds), want) <= FLOAT32


def test_activation_quantisation_without_norm(tensors: Tensors) -> None:
    codes, scale = rms_norm_quantize(tensors["tf_act_quant.x"], rounding="half_even")
    assert mx.array_equal(codes, tensors["tf_act_quant.int8"].astype(mx.float32))
    assert relative_error(scale, tensors["tf_act_quant.scale"]) <= FLOAT32
    assert relative_error(codes / scale, tensors["tf_act_quant.y"]) <= FLOAT32


def test_llama3_wavelengths(tensors: Tensors) -> None:
    wavelengths = llama3_wavelengths(
        rope_wavelengths(32, 500000.0),
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        trained_length=8192,
    )
    want = tensors["rope_llama3.inv_freq"]
    for got, frequency in zip(1.0 / wavelengths, want, strict=True):
        assert relative_error(got, frequency) <= FLOAT32


def test_packed_trits(tensors: Tensors) -> None:
    trits, packed = tensors["pack.ternary"].astype(mx.float32), tensors["pack.packed"]
    assert bitnet.packed_shape(*trits.shape) == packed.shape
    assert mx.array_equal(bitnet.repack(packed, len(trits)), pack_ternary(trits))


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("bitlinear_packed", {}),
        ("bitlinear_packed", {"linear_class": "bitlinear"}),
        ("autobitlinear_offline", {"linear_class": "autobitlinear"}),
    ],
)
def test_packed_linear(tensors: Tensors, name: str, described: dict[str, str]) -> None:
    output_dims, input_dims = tensors["pack.ternary"].shape
    layer = PackedBitLinear(input_dims, output_dims)
    layer.weight = bitnet.repack(tensors["pack.packed"], output_dims)
    layer.scale = bitnet.scale_of(described, tensors[f"{name}.weight_scale"])
    for got, want in zip(layer(tensors["tf_act_quant.x"]), tensors[f"{name}.y"], strict=True):
        assert relative_error(got, want) <= FLOAT32


@pytest.mark.parametrize("bits", [1, 2])
def test_product_with_affine_codes(newer_ops_folder: Path, bits: int) -> None:
    tensors = {
        name.partition(".")[2]: x
        for name, x in golden(newer_ops_folder).items()
        if name.startswith(f"affine{bits}.")
    }
    format = AffineFormat(tensors["scales"], tensors["biases"], 128, bits)

    def multiply(x: mx.array) -> mx.array:
        return dense_matmul(x, tensors["packed"], format)

    y = multiply(tensors["x"])
    assert relative_error(y, tensors["y"]) <= FLOAT32
    gradient = mx.grad(lambda x: (multiply(x) * tensors["y"]).sum())(tensors["x"])
    assert relative_error(gradient, tensors["y"] @ tensors["values"]) <= GRADIENT_TOLERANCE


KINDS = {kind.name: kind for kind in TYPES.values()}
WRITTEN = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")


@pytest.mark.parametrize("name", [*WRITTEN, "PQ2_0", "PTQ1_0"])
def test_blocks_of_gguf(blocks_folder: Path, name: str) -> None:
    kind = KINDS[name]
    block = {
        key.partition(".")[2]: np.asarray(value)
        for key, value in golden(blocks_folder).items()
        if key.startswith(f"{name.lower()}.")
    }
    for data, want in (("encoded", "values"), ("any_bytes", "any_values")):
        values, found = block[want], block[data].reshape(-1)
        np.testing.assert_array_equal(dequantized(kind, found, values.shape), values)
        if kind.code_bits:
            words = mx.array(code_words(kind, found, values.shape))
            scale, bias = (
                mx.array(code_scales(kind, found, values.shape, factor).view("<f2"))
                for factor in (2 if kind.code_bits == 1 else 1, -1)
            )
            affine = mx.dequantize(
                words,
                scale.astype(mx.float32),
                bias.astype(mx.float32),
                group_size=kind.block,
                bits=kind.code_bits,
            )
            np.testing.assert_array_equal(np.asarray(affine), values)
    if name in WRITTEN:
        codes = (block["codes"] + 1).astype(np.uint8)
        written = encode(kind, codes, block["scales"])
        np.testing.assert_array_equal(written, block["encoded"].reshape(-1))


def test_blocks_of_bitnet_cpp(blocks_folder: Path) -> None:
    block = {key: np.asarray(value) for key, value in golden(blocks_folder).items()}
    want = block["i2_s.values"]
    np.testing.assert_array_equal(
        dequantized(KINDS["I2_S"], block["i2_s.encoded"], want.shape), want
    )


def test_rotations_of_mlx(newer_ops_folder: Path) -> None:
    found = golden(newer_ops_folder)
    cases = {name.partition(".")[0] for name in found if name.startswith("hadamard_")}
    assert cases
    for case in cases:
        x, signs, block = (found[f"{case}.{name}"] for name in ("x", "signs", "block"))
        for name, inverse in (("forward", False), ("inverse", True)):
            y = hadamard(x, block.item(), signs, inverse=inverse)
            assert relative_error(y, found[f"{case}.{name}"]) <= FLOAT32, case
