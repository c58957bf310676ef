"""SwiGLU against its formula, with separate and stacked projections."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree import SwiGLU
from mlx_mmfree.channel_mixers.swiglu import default_hidden_dims


@pytest.mark.parametrize("is_stacked", [False, True])
def test_formula(is_stacked: bool) -> None:
    mx.random.seed(0)
    mixer = SwiGLU(12, hidden_dims=20, is_stacked=is_stacked)
    x = mx.random.normal((2, 5, 12))
    if is_stacked:
        gate, up = mx.split(mixer.gate_up_proj.weight, 2)
    else:
        gate, up = mixer.gate_proj.weight, mixer.up_proj.weight
    want = (nn.silu(x @ gate.T) * (x @ up.T)) @ mixer.down_proj.weight.T
    assert mx.allclose(mixer(x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dims", "want"), [(64, 256), (1024, 2816), (2048, 5632), (2560, 6912), (96, 256), (97, 512)]
)
def test_default_width(dims: int, want: int) -> None:
    assert default_hidden_dims(dims) == want
