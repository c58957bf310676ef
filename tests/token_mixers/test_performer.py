"""Random features as an estimate of the softmax, and the matrix that they are made with."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.token_mixers import GQA, Performer
from mlx_mmfree.token_mixers.performer import orthogonal_projection
from tests.tolerances import relative_error


@pytest.mark.parametrize("is_causal", [True, False])
def test_many_features_come_near_the_softmax(is_causal: bool) -> None:
    mx.random.seed(1)
    exact = GQA(16, num_heads=2, is_causal=is_causal)
    mixer = Performer(16, num_heads=2, num_features=4096, eps=1e-6, is_causal=is_causal)
    for name in ("query_proj", "key_proj", "value_proj", "output_proj"):
        mixer[name].weight = exact[name].weight
    x = 0.5 * mx.random.normal((1, 20, 16))
    want = exact(x)[0]
    assert mx.abs(mixer(x)[0] - want).max().item() < 0.05 * mx.abs(want).max().item()


@pytest.mark.parametrize("is_causal", [True, False])
def test_large_vectors_do_not_overflow(is_causal: bool) -> None:
    mx.random.seed(2)
    mixer = Performer(16, num_heads=2, is_causal=is_causal)
    x = 200.0 * mx.random.normal((1, 20, 16))
    valid = mx.arange(20)[None] % 5 != 0
    gradient = mx.grad(lambda x: mx.where(valid[..., None], mixer(x, None, valid)[0], 0.0).sum())(x)
    assert mx.isfinite(mixer(x)[0]).all().item() and mx.isfinite(gradient).all().item()


@pytest.mark.parametrize("is_causal", [True, False])
def test_epsilon_stays_small_beside_the_features_of_long_vectors(is_causal: bool) -> None:
    mx.random.seed(3)
    mixer = Performer(8, num_heads=1, num_features=12, eps=1e-6, is_causal=is_causal)
    x = 3.0 * mx.random.normal((1, 15, 8))
    q, k, v = (
        np.array(x[0], np.float64) @ np.array(mixer[name].weight, np.float64).T
        for name in ("query_proj", "key_proj", "value_proj")
    )
    directions = np.array(mixer.projection_matrix, np.float64)
    # without epsilon, any constants cancel
    features = [
        np.exp(y @ directions.T - (y * y).sum(axis=1, keepdims=True) / 2)
        for y in (part * 8**-0.25 for part in (q, k))
    ]
    weights = features[0] @ features[1].T
    weights = np.tril(weights) if is_causal else weights
    o = weights / weights.sum(axis=1, keepdims=True) @ v
    want = o @ np.array(mixer.output_proj.weight, np.float64).T
    assert relative_error(mixer(x)[0][0], mx.array(want, mx.float32)) < 1e-3


def test_directions_are_orthogonal_by_blocks() -> None:
    rows = np.array(orthogonal_projection(10, 4, mx.random.key(3)))
    for start in (0, 4, 8):
        block = rows[start : start + 4]
        products = block @ block.T
        assert np.allclose(products, np.diag(np.diag(products)), atol=1e-5)
    assert len(set(np.linalg.norm(rows, axis=1).round(4))) == 10


def test_the_matrix_is_saved_and_never_trained() -> None:
    mixer = Performer(16, num_heads=2)
    mixer.unfreeze()
    assert "projection_matrix" in mixer.parameters()
    assert "projection_matrix" not in dict(tree_flatten(mixer.trainable_parameters()))
    before = mixer.projection_matrix
    mixer.redraw()
    assert not mx.array_equal(mixer.projection_matrix, before)


@pytest.mark.parametrize("option", [{"kernel": "exp"}, {"key_maximum": "all"}])
def test_unknown_options_list_the_known(option: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=rf"'{next(iter(option))}' must be one of"):
        Performer(16, **option)
