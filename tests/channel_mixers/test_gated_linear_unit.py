"""The gated feed-forward family against its formulas."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import GatedLinearUnit, GeGLU, ReGLU, SquaredReLUGLU, SwiGLU
from mlx_mmfree.channel_mixers.gated_linear_unit import default_hidden_dims
from mlx_mmfree.layers import BitLinear

FAMILY: dict[type[GatedLinearUnit], Callable[[mx.array], mx.array]] = {
    SwiGLU: lambda x: x / (1 + mx.exp(-x)),
    GeGLU: lambda x: x * (1 + mx.erf(x / 2**0.5)) / 2,
    ReGLU: lambda x: mx.maximum(x, 0),
    SquaredReLUGLU: lambda x: mx.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("norm_eps", [None, 1e-5])
def test_formula(kind: type[GatedLinearUnit], is_stacked: bool, norm_eps: float | None) -> None:
    mx.random.seed(0)
    mixer = kind(12, hidden_dims=20, is_stacked=is_stacked, norm_eps=norm_eps)
    x = mx.random.normal((2, 5, 12))
    if is_stacked:
        gate, up = mx.split(mixer.gate_up_proj.weight, 2)
    else:
        gate, up = mixer.gate_proj.weight, mixer.up_proj.weight
    hidden = FAMILY[kind](x @ gate.T) * (x @ up.T)
    if norm_eps is not None:
        hidden = hidden * mx.rsqrt(mx.mean(hidden**2, axis=-1, keepdims=True) + norm_eps)
    assert mx.allclose(mixer(x), hidden @ mixer.down_proj.weight.T, rtol=1e-4, atol=1e-5)


def test_biases() -> None:
    mixer = SwiGLU(12, hidden_dims=20, bias=True)
    assert all("bias" in mixer[name] for name in ("gate_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize("linear", [nn.Linear, BitLinear])
def test_squares_do_not_overflow_16_bits(linear: type[nn.Module]) -> None:
    mx.random.seed(0)
    mixer = SquaredReLUGLU(12, hidden_dims=20, norm_eps=1e-5, linear=linear)
    mixer.set_dtype(mx.float16)
    y = mixer(mx.full((1, 12), 3000.0, mx.float16))
    assert y.dtype == mx.float16
    assert mx.isfinite(y).all().item()
    wide = SquaredReLUGLU(12, hidden_dims=20, norm_eps=1e-5, linear=linear)
    wide.update(mixer.parameters())
    wide.set_dtype(mx.float32)
    assert mx.allclose(y, wide(mx.full((1, 12), 3000.0)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("dims", "want"), [(64, 256), (1024, 2816), (2048, 5632), (2560, 6912), (96, 256), (97, 512)]
)
def test_default_width(dims: int, want: int) -> None:
    assert default_hidden_dims(dims) == want
