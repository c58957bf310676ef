"""The gated feed-forward layer."""

from mlx_mmfree.channel_mixers import SwiGLU
from tests.goldens.mixers.files import GoldenFile, assert_close, fill, golden


@golden("swiglu__llama_mlp")
def test_swiglu(file: GoldenFile) -> None:
    mixer = SwiGLU(file.hyper["hidden"], hidden_dims=file.hyper["intermediate"])
    fill(mixer, file.weights, {name: name for name in ("gate_proj", "up_proj", "down_proj")})
    assert_close(mixer(file.inputs["x"]), file.out["y"])
