"""Linformer: what its options share, padding with biases, what is refused."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.token_mixers import Linformer
from tests.tolerances import TOLERANCE, relative_error


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, set()),
        ({"shares_lengths": True}, {"value_length_proj.weight"}),
        ({"shares_values": True}, {"value_length_proj.weight", "value_proj.weight"}),
    ],
)
def test_what_is_shared_has_no_parameter(options: dict[str, bool], missing: set[str]) -> None:
    names = {
        *(f"{name}_proj.weight" for name in ("query", "key", "value", "output")),
        *(f"{name}_length_proj.weight" for name in ("key", "value")),
    }
    mixer = Linformer(16, max_length=8, num_projected=4, num_heads=2, **options)
    assert {path for path, _ in tree_flatten(mixer.parameters())} == names - missing


def test_a_shared_matrix_projects_keys_and_values() -> None:
    x = mx.random.normal((2, 6, 16))
    shared = Linformer(16, max_length=8, num_projected=4, num_heads=2, shares_lengths=True)
    apart = Linformer(16, max_length=8, num_projected=4, num_heads=2)
    apart.load_weights(tree_flatten(shared.parameters()), strict=False)
    apart.value_length_proj.weight = shared.key_length_proj.weight
    assert mx.array_equal(shared(x)[0], apart(x)[0])


def test_padding_counts_nothing_though_there_are_biases() -> None:
    mixer = Linformer(16, max_length=9, num_projected=4, num_heads=2, bias=True)
    x = mx.random.normal((2, 9, 16))
    valid = mx.array([[True] * 4 + [False] * 2 + [True] * 3, [False] * 3 + [True] * 6])
    y, _ = mixer(x, None, valid)
    real = mx.array([0, 1, 2, 3, 6, 7, 8])
    assert relative_error(y[0, real], mixer(x[:1, real])[0][0]) <= TOLERANCE[mx.float32]
    assert relative_error(y[1, 3:], mixer(x[1:, 3:])[0][0]) <= TOLERANCE[mx.float32]
    assert not y[0, 4:6].any().item()


def test_a_memory_beyond_the_length() -> None:
    mixer = Linformer(16, max_length=8, num_projected=4, num_heads=2)
    y, _ = mixer(mx.zeros((1, 12, 16)), memory=mx.zeros((1, 8, 16)))
    assert y.shape == (1, 12, 16)
    with pytest.raises(ValueError, match=r"'memory' must not be longer than 'max_length', 8"):
        mixer(mx.zeros((1, 2, 16)), memory=mx.zeros((1, 9, 16)))
