"""GRU: the equations of the paper, in float64."""

import mlx.core as mx
import numpy as np

from mlx_mmfree.token_mixers import GRU
from tests.tolerances import TOLERANCE, relative_error


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def test_the_reset_before_the_product() -> None:
    mx.random.seed(5)
    mixer, x = GRU(6, hidden_dims=4, resets_before=True), mx.random.normal((2, 7, 6))

    def apply(name: str, value: np.ndarray) -> np.ndarray:
        weight, bias = (
            np.array(part, np.float64) for part in (mixer[name].weight, mixer[name].bias)
        )
        return value @ weight.T + bias

    hidden, want = np.zeros((2, 4)), []
    for step in np.array(x, np.float64).swapaxes(0, 1):
        reset, update = (
            _sigmoid(apply(f"{name}_proj", step) + apply(f"hidden_{name}_proj", hidden))
            for name in ("reset", "update")
        )
        inner = apply("hidden_candidate_proj", reset * hidden)
        candidate = np.tanh(apply("candidate_proj", step) + inner)
        hidden = update * hidden + (1 - update) * candidate
        want.append(hidden @ np.array(mixer.output_proj.weight, np.float64).T)
    got, state = mixer(x)
    assert relative_error(got, mx.array(np.stack(want, axis=1))) <= TOLERANCE[mx.float32]
    assert relative_error(state.hidden, mx.array(hidden)) <= TOLERANCE[mx.float32]


def test_no_position_changes_nothing() -> None:
    mixer = GRU(6)
    state = mixer(mx.random.normal((2, 3, 6)))[1]
    y, after = mixer(mx.zeros((2, 0, 6)), state)
    assert y.shape == (2, 0, 6) and mx.array_equal(after.hidden, state.hidden)
