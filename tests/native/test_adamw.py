"""A step of AdamW in C++ has the bits of its definition."""

import mlx.core as mx
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import adamw, use_backend

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

LAYOUTS = {
    "dense": lambda g: g,
    "turned": lambda g: mx.contiguous(g.T).T,
    "apart": lambda g: mx.repeat(g, 2, axis=1)[:, ::2],
    "shared": lambda g: mx.broadcast_to(g[:1], g.shape),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (16, 128), (37, 259), (100, 400)])
def test_bits_are_those_of_the_definition(
    shape: tuple[int, int], layout: str, threads: int, instructions: str
) -> None:
    mx.random.seed(1)
    w, g, m = (mx.random.normal(shape) for _ in range(3))
    v = mx.random.uniform(shape=shape)
    results = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            factors = mx.array([0.99, 0.02, 1.5])
            call = (w, LAYOUTS[layout](g), m, v, factors)
            results.append(adamw(*call, betas=(0.9, 0.95), eps=1e-8))
    assert all(mx.array_equal(own, other) for own, other in zip(*results, strict=True))


def test_nothing_and_what_is_refused() -> None:
    none = mx.zeros((0, 3))
    results = adamw(none, none, none, none, mx.ones(3), betas=(0.9, 0.95), eps=1e-8)
    assert [x.shape for x in results] == [(0, 3)] * 3
    kernel, x = native.kernels().adamw, mx.ones((2, 3))
    with pytest.raises(ValueError, match="must be float32 of one shape"):
        kernel(x, x.T, x, x, mx.ones(3), 0.9, 0.95, 1e-8)
    with pytest.raises(ValueError, match="must be float32 of one shape"):
        kernel(x, x.astype(mx.float16), x, x, mx.ones(3), 0.9, 0.95, 1e-8)
    with pytest.raises(ValueError, match="'factors' must be float32"):
        kernel(x, x, x, x, mx.ones(4), 0.9, 0.95, 1e-8)
