"""Biases by distance: slopes, buckets at a realistic size, what is refused."""

import mlx.core as mx
import pytest

from mlx_mmfree.layers.attention.positions import ALiBi, RelativeBias
from mlx_mmfree.token_mixers import GQA


def test_slopes_as_published() -> None:
    distance = mx.array([[[-1]]])
    powers = [-(2.0**-n) for n in range(1, 9)]
    assert ALiBi(8)(distance).reshape(-1).tolist() == powers
    # beyond the largest power of 2, every second of twice as many
    got = ALiBi(6)(distance).reshape(-1)
    want = mx.array([-(2.0 ** -(2 * n)) for n in range(1, 5)] + [-(2.0**-1), -(2.0**-3)])
    assert mx.allclose(got, want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_buckets_of_t5(is_causal: bool) -> None:
    bias = RelativeBias(1, is_causal=is_causal)
    bias.weight = mx.arange(32)[:, None].astype(mx.float32)

    def bucket(relative: int) -> int:
        return int(bias(mx.array([[[relative]]])).item())

    # from the formula of the paper's code: exact ones first, then 16 per factor of 8 (8 per side)
    wanted = {0: 0, 1: 1, 15: 15, 16: 16, 20: 17, 127: 31, 128: 31, 10_000: 31}
    if not is_causal:
        wanted = {0: 0, 1: 1, 7: 7, 8: 8, 16: 10, 32: 12, 64: 14, 127: 15, 10_000: 15}
    assert {distance: bucket(-distance) for distance in wanted} == wanted
    later = 0 if is_causal else 16
    assert [bucket(1), bucket(9000)] == ([0, 0] if is_causal else [later + 1, later + 15])


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="'num_buckets' must be a multiple of 4"):
        RelativeBias(2, num_buckets=6, is_causal=False)
    with pytest.raises(ValueError, match="'max_distance' must be larger than 16"):
        RelativeBias(2, max_distance=16)
    with pytest.raises(ValueError, match=r"\[GQA\] 'position_bias' must be made for 4 heads"):
        GQA(16, num_heads=4, position_bias=ALiBi(2))
