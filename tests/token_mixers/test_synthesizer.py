"""Synthesizer and gMLP: which numbers meet, samples seen from both sides, what is refused."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.token_mixers import GMLP, Synthesizer
from mlx_mmfree.token_mixers.synthesizer import Tiling
from tests.tolerances import TOLERANCE, relative_error


def _weights(tiling: Tiling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weights that the first of 8 tokens gives, and its two factors of 4 and 2 numbers."""
    mx.random.seed(2)
    mixer = Synthesizer(
        8,
        max_length=8,
        scores="factorized_dense",
        score_dims=4,
        tiling=tiling,
        num_heads=1,
        is_causal=False,
    )
    x = mx.eye(8)[None]
    mixer.value_proj.weight = mixer.output_proj.weight = mx.eye(8)
    y = mixer(x)[0][0, 0]
    return np.array(y), np.array(mixer.first_proj(x)[0, 0]), np.array(mixer.second_proj(x)[0, 0])


def test_all_pairs_of_factors_occur() -> None:
    y, a, b = _weights("both_ways")
    want = np.exp(np.outer(a, b).reshape(-1))
    np.testing.assert_allclose(y, want / want.sum(), rtol=1e-5)
    assert len(np.unique(y)) == 8
    # repeated in the same way, columns coincide
    assert len(np.unique(_weights("whole")[0])) == 4


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        partial(Synthesizer),
        partial(Synthesizer, scores="random"),
        partial(GMLP, attention_dims=4),
    ],
    ids=["dense", "random", "gmlp"],
)
def test_samples_of_a_row_are_seen_apart(kind: Any, is_causal: bool) -> None:
    mixer = kind(16, max_length=9, num_heads=2, is_causal=is_causal)
    if isinstance(mixer, GMLP):
        # fresh ones are near 0
        mixer.spatial_weight = mx.random.normal(mixer.spatial_weight.shape, key=mx.random.key(2))
    x = mx.random.normal((1, 9, 16), key=mx.random.key(1))
    starts = mx.array([[True, False, False, False, True, True, False, False, False]])
    valid = mx.arange(9)[None] != 6
    got, _ = mixer(x, None, valid, starts=starts)
    real = mx.array([0, 1, 2, 3, 4, 5, 7, 8])
    want = mx.concatenate([mixer(part)[0] for part in mx.split(x[:, real], [4, 5], axis=1)], axis=1)
    assert relative_error(got[:, real], want) <= TOLERANCE[mx.float32]


def test_words_and_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[Synthesizer\] 'scores' must be one of 'dense'"):
        Synthesizer(8, max_length=4, scores="sparse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[GMLP\] 'hidden_dims' must be a multiple of twice"):
        GMLP(8, max_length=4, hidden_dims=6, num_heads=2)


@pytest.mark.parametrize("kind", [Synthesizer, GMLP])
def test_a_state_has_slots_for_so_many(kind: Any) -> None:
    mixer = kind(8, max_length=4)
    state = mixer(mx.zeros((1, 3, 8)))[1]
    state = mixer(mx.zeros((1, 1, 8)), state)[1]
    with pytest.raises(ValueError, match=r"'max_length', 4, but have 5 positions"):
        mixer(mx.zeros((1, 1, 8)), state)
