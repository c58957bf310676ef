"""Attention of many tokens in tiles, against its definition."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mmfree import native
from mlx_mmfree.ops import attention, use_backend
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
LAYOUTS = {
    "dense": lambda x: x,
    "tokens first": lambda x: mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2),
    "with capacity": lambda x: mx.pad(x, [(0, 0), (0, 0), (0, 3), (0, 0)])[:, :, : x.shape[2]],
    "reversed": lambda x: mx.contiguous(x[..., ::-1])[..., ::-1],
    "shared": lambda x: mx.broadcast_to(x[:1], x.shape),
}
MASKS = [None, "causal", (2, 1), (1, 1), (2, 0), (0, 0)]


def run(backend: str, *args: Any) -> mx.array:
    with use_backend(backend):
        y = attention(*args)
        mx.eval(y)
    return y


@pytest.mark.exhaustive
@given(
    length=st.sampled_from([1, 2, 13, 48, 49, 130]),
    more=st.sampled_from([0, 1, 5, 128, 200]),
    heads=st.sampled_from([(1, 1), (6, 1), (6, 6), (4, 2), (60, 1)]),
    dims=st.sampled_from([(8, 8), (64, 64), (100, 20), (128, 33)]),
    mask=st.sampled_from(MASKS),
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 2),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_equals_definition(
    length: int,
    more: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    mask: Any,
    layouts: tuple[str, str, str],
    dtypes: tuple[mx.Dtype, mx.Dtype],
) -> None:
    mx.random.seed(length + more)
    count = length + more
    shapes = [(heads[0], length, dims[0]), (heads[1], count, dims[0]), (heads[1], count, dims[1])]
    arrays = [
        LAYOUTS[layout](mx.random.normal((2, *shape)).astype(dtype))
        for shape, layout, dtype in zip(
            shapes, layouts, (dtypes[0], dtypes[1], dtypes[1]), strict=True
        )
    ]
    if isinstance(mask, tuple):
        rows, tokens = mask
        mask = mx.random.uniform(shape=(rows or 1, 1, length if tokens else 1, count)) < 0.8
        mask[..., 0] = True
        mask = mask if rows else mask[0, 0]
    got = run("native", *arrays, mask)
    want = run("reference", arrays[0].astype(mx.float32), *arrays[1:], mask)
    assert got.dtype == dtypes[0] and got.shape == (2, heads[0], length, dims[1])
    assert relative_error(got, want) <= TOLERANCE[dtypes[0]]
    flat = got.swapaxes(1, 2).reshape(2, length, -1)
    assert relative_error(flat, want.swapaxes(1, 2).reshape(2, length, -1)) <= TOLERANCE[dtypes[0]]


def test_a_query_keeps_its_bits(instructions: str, threads: int) -> None:
    mx.random.seed(2)
    q, k, v = (mx.random.normal((2, heads, 300, 40)) for heads in (6, 2, 2))
    whole = run("native", q, k, v, "causal")
    native.kernels().set_threads(1)
    for start, stop in ((0, 1), (7, 60), (130, 131), (250, 300)):
        part = run("native", q[1:, :, start:stop], k[1:, :, :stop], v[1:, :, :stop], "causal")
        assert mx.array_equal(part, whole[1:, :, start:stop])
    mask = mx.arange(300) <= mx.arange(300)[:, None]
    assert mx.array_equal(run("native", q, k, v, mask), whole)


def test_a_query_that_sees_nothing_gives_nan() -> None:
    q, k, v = (mx.random.normal((1, 1, length, 8)) for length in (5, 3, 3))
    y = run("native", q, k, v, "causal")
    assert mx.isnan(y[:, :, :2]).all() and mx.isfinite(y[:, :, 2:]).all()
    mask = mx.array([[True, False, True], [False, False, False]])
    y = run("native", q[:, :, :2], k, v, mask)
    assert mx.isfinite(y[:, :, 0]).all() and mx.isnan(y[:, :, 1]).all()


def test_hidden_values_count_for_nothing() -> None:
    q, k, v = (mx.random.normal((1, 2, 200, 8)) for _ in range(3))
    want = run("native", q, k, v, "causal")
    k[:, :, 150:] *= 1e30
    v[:, :, 150:] *= 1e30
    assert mx.array_equal(run("native", q, k, v, "causal")[:, :, :150], want[:, :, :150])


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("mask", [None, "causal", "drawn"])
def test_transforms(mask: Any) -> None:
    mx.random.seed(4)
    q, k, v = (mx.random.normal((3, 2, heads, 9, 8)) for heads in (4, 2, 2))
    if mask == "drawn":
        mask = mx.random.uniform(shape=(2, 1, 9, 9)) < 0.8
        mask[..., 0] = True

    def call(*arrays: mx.array) -> mx.array:
        return attention(*arrays, mask)

    with use_backend("native"):
        want = mx.stack([call(*arrays) for arrays in zip(q, k, v, strict=True)])
        assert mx.array_equal(mx.compile(call)(q[0], k[0], v[0]), want[0])
        assert mx.array_equal(mx.vmap(call)(q, k, v), want)
        moved = mx.vmap(call, in_axes=(1, None, 1))(q.swapaxes(0, 1), k[0], v.swapaxes(0, 1))
        for n in range(3):
            assert relative_error(moved[n], call(q[n], k[0], v[n])) <= TOLERANCE[mx.float32]


def test_what_is_refused() -> None:
    x = mx.ones((1, 2, 3, 8))
    call = native.kernels().attention
    with pytest.raises(ValueError, match=r"must be \(B, G, N, K\)"):
        call(x, x[..., :4], x, None, False)
    with pytest.raises(ValueError, match="must be floats"):
        call(x, x, x.astype(mx.int32), None, False)
    with pytest.raises(ValueError, match="'mask' must be booleans"):
        call(x, x, x, mx.ones((3, 3)), False)
    with pytest.raises(ValueError, match="broadcast"):
        call(x, x, x, mx.ones((3, 4)) > 0, False)
    with pytest.raises(ValueError, match="not be empty"):
        call(x[:, :, :0], x, x, None, False)
