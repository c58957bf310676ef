"""Promises of attention by other kernels than the softmax, beyond the contract."""

import mlx.core as mx
import pytest

from mlx_mmfree.token_mixers import CosFormer, Hydra, LinearAttention, SimA


def test_a_zero_vector_has_a_direction_of_zero() -> None:
    mixer, x = Hydra(16), mx.zeros((1, 3, 16))
    assert mx.array_equal(mixer(x)[0], x)
    gradient = mx.grad(lambda x: mixer(x)[0].sum())(x)
    assert mx.isfinite(gradient).all().item()


def test_a_text_that_outgrows_its_length_is_no_number() -> None:
    mixer, x = CosFormer(16, num_heads=2, max_length=5), mx.ones((1, 4, 16))
    _, state = mixer(x)
    y, _ = mixer(x, state)
    assert mx.isfinite(y[:, 0]).all().item() and mx.isnan(y[:, 1:]).all().item()


@pytest.mark.parametrize("mixer", [CosFormer, Hydra, LinearAttention])
def test_samples_are_refused_where_all_of_a_row_is_seen(mixer: type) -> None:
    with pytest.raises(ValueError, match=rf"^\[{mixer.__name__}\] 'starts' must be None where"):
        mixer(16, is_causal=False)(mx.ones((1, 3, 16)), starts=mx.ones((1, 3), mx.bool_))


def test_class_attention_changes_the_first_token_that_is_no_padding() -> None:
    mixer, x = SimA(16, class_only=True), mx.random.normal((1, 6, 16), key=mx.random.key(1))
    y, _ = mixer(x, None, mx.arange(6)[None] >= 2)
    assert mx.array_equal(y[:, 3:], x[:, 3:]) and not mx.array_equal(y[:, 2], x[:, 2])
    assert mx.allclose(y[:, 2:], mixer(x[:, 2:])[0])


def test_unknown_feature_maps_list_the_known() -> None:
    with pytest.raises(ValueError, match="'feature_map' must be one of elu, relu, identity"):
        LinearAttention(16, feature_map="cosine")
