"""Inputs of a wrong width, dtype or rank are named; scales stay float32 in every dtype."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import BitLinear, PackedLinear, pack_linears
from mlx_mmfree.layers.lora import DoRALinear, LoRALinear
from mlx_mmfree.layers.sharded_linear import sharded_to_all
from mlx_mmfree.token_mixers import GQA, MLGRU

GROUP = mx.distributed.init()
MODULES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "BitLinear": ("BitLinear", lambda: BitLinear(8, 4)),
    "BitLinear with norm": ("BitLinear", lambda: BitLinear(8, 4, norm_eps=1e-6)),
    "packed": ("BitLinear", lambda: BitLinear(8, 4).to_packed()),
    "packed with norm": ("BitLinear", lambda: BitLinear(8, 4, norm_eps=1e-6).to_packed()),
    "packed, floats": (
        "BitLinear",
        lambda: BitLinear(8, 4, quantize_activations=False).to_packed(),
    ),
    "LoRA": ("BitLinear", lambda: LoRALinear(BitLinear(8, 4).to_packed())),
    "DoRA": ("BitLinear", lambda: DoRALinear(BitLinear(8, 4).to_packed())),
    "sharded": ("BitLinear", lambda: sharded_to_all(BitLinear(8, 4).to_packed(), GROUP)),
    "PackedLinear": ("PackedLinear", lambda: PackedLinear(8, 4)),
    "sharded PackedLinear": ("PackedLinear", lambda: sharded_to_all(PackedLinear(8, 4), GROUP)),
    "SwiGLU": ("SwiGLU", lambda: SwiGLU(8, hidden_dims=16)),
    "ternary SwiGLU": ("SwiGLU", lambda: SwiGLU(8, hidden_dims=16, linear=BitLinear)),
    "packed SwiGLU": ("SwiGLU", lambda: pack_linears(SwiGLU(8, hidden_dims=16, linear=BitLinear))),
    "MLGRU": ("MLGRU", lambda: MLGRU(8)),
    "packed MLGRU": ("MLGRU", lambda: pack_linears(MLGRU(8, linear=BitLinear))),
    "GQA": ("GQA", lambda: GQA(8, num_heads=2)),
    "packed GQA": ("GQA", lambda: pack_linears(GQA(8, num_heads=2, linear=BitLinear))),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_width_is_named(name: str) -> None:
    caller, make = MODULES[name]
    module = make()
    for width in (1, 7, 9, 16):
        rule = r"'x' must have 8 values in its last axis but got shape"
        with pytest.raises(ValueError, match=rf"^\[{caller}\] {rule} \(2, 3, {width}\)"):
            module(mx.ones((2, 3, width)))


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_dtype_is_named(name: str) -> None:
    caller, make = MODULES[name]
    module = make()
    for dtype in (mx.int32, mx.bool_, mx.complex64):
        with pytest.raises(TypeError, match=rf"^\[{caller}\] 'x' must hold floats but got "):
            module(mx.ones((2, 3, 8), dtype))


@pytest.mark.parametrize("name", MODULES)
def test_a_single_number_is_refused(name: str) -> None:
    caller, make = MODULES[name]
    with pytest.raises(ValueError, match=rf"^\[{caller}\] 'x' must have"):
        make()(mx.array(1.0))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lambda: BitLinear(8, 4).to_packed(), lambda: PackedLinear(8, 4)])
def test_scales_stay_float32(make: Callable[[], nn.Module], dtype: mx.Dtype) -> None:
    layer = make()
    layer.scale = mx.array([0.1234567])
    x = mx.random.normal((2, 8)).astype(dtype)
    before = layer(x)
    layer.set_dtype(dtype)
    assert layer.scale.dtype == mx.float32 and layer.scale.item() == pytest.approx(0.1234567)
    assert mx.array_equal(layer(x), before)
    # other values are taken
    layer.scale = mx.array([0.5], dtype)
    assert layer.scale.dtype == mx.float32 and layer.scale.item() == 0.5
