"""The gated recurrent unit."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.token_mixers import GRU
from mlx_mmfree.token_mixers.gru import GRUState
from tests.goldens.mixers.files import GoldenFile, assert_close, golden

GATES = ("reset_proj", "update_proj", "candidate_proj")


def _mixer(file: GoldenFile) -> GRU:
    """Dims as wide as the state, so that the output can show all of it; further inputs are zero."""
    inputs, hidden = file.hyper["input"], file.hyper["hidden"]
    dims = max(inputs, hidden)
    mixer = GRU(dims, hidden_dims=hidden)
    weights: dict[str, Any] = {
        f"{prefix}{kind}": mx.split(file.weights[f"{kind}_{which}_l0"], 3)
        for prefix, which in (("", "ih"), ("hidden_", "hh"))
        for kind in ("weight", "bias")
    }
    for n, name in enumerate(GATES):
        mixer[name].weight = mx.pad(weights["weight"][n], [(0, 0), (0, dims - inputs)])
        mixer[name].bias = weights["bias"][n]
        mixer[f"hidden_{name}"].weight = weights["hidden_weight"][n]
        mixer[f"hidden_{name}"].bias = weights["hidden_bias"][n]
    mixer.output_proj.weight = mx.eye(dims)[:, :hidden]
    return mixer


@golden("gru__torch")
@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_gru(file: GoldenFile, cut: int) -> None:
    mixer, hidden = _mixer(file), file.hyper["hidden"]
    x = file.inputs["x"]
    x = mx.pad(x, [(0, 0), (0, 0), (0, mixer.output_proj.weight.shape[0] - x.shape[-1])])
    for name, state in (("y", None), ("y_h0", GRUState(file.inputs["h0"][0]))):
        parts = []
        for start in range(0, x.shape[1], cut):
            y, state = mixer(x[:, start : start + cut], state)
            parts.append(y)
        assert_close(mx.concatenate(parts, axis=1)[..., :hidden], file.out[name])
        if name == "y":
            assert_close(state.hidden[None], file.out["h_last"])
