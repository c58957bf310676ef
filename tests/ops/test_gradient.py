"""Values of one function with the gradient of another, under every order of transformations."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from mlx_mmfree.ops.backend.gradient import with_reference_gradient


def reference(x: mx.array, weight: mx.array, counts: mx.array) -> tuple[mx.array, mx.array]:
    y = mx.sin(x) * weight * counts
    return y, (y * y).sum(axis=-1)


def run(x: mx.array, weight: mx.array, counts: mx.array) -> tuple[mx.array, mx.array]:
    # the same values with a wrong gradient, as far as MLX can tell
    return reference(2 * x - mx.stop_gradient(x), mx.stop_gradient(weight), counts)


calls: list[str] = []


def backward(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array | None, ...]:
    calls.append("backward")
    x, weight, counts = inputs
    gradient = cotangents[0] + 2 * outputs[0] * cotangents[1][..., None]
    by_weight = gradient * mx.sin(x) * counts
    # like a kernel, it hides how its values came about
    results = gradient * mx.cos(x) * weight * counts, by_weight.sum(axis=tuple(range(x.ndim - 1)))
    return *(mx.stop_gradient(r) for r in results), None


FUNCTIONS = {
    "reference": with_reference_gradient(run, reference),
    "backward": with_reference_gradient(run, reference, backward),
}
X = mx.random.normal((3, 4), key=mx.random.key(0))
WEIGHT = mx.random.normal((4,), key=mx.random.key(1))
COUNTS = mx.array([1, 2, 0, 3], mx.uint32)


def loss(function: Callable) -> Callable[[mx.array, mx.array], mx.array]:
    def of(x: mx.array, weight: mx.array) -> mx.array:
        y, squares = function(x, weight, COUNTS)
        return (y**3).sum() + squares.sum()

    return of


def each_row(function: Callable) -> Callable[[mx.array, mx.array], mx.array]:
    mapped = mx.vmap(loss(function), in_axes=(0, None))
    return lambda x, weight: mapped(x, weight).sum()


TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "grad": lambda f: mx.grad(loss(f), argnums=(0, 1)),
    "compile(grad)": lambda f: mx.compile(mx.grad(loss(f), argnums=(0, 1))),
    "grad(compile)": lambda f: mx.grad(mx.compile(loss(f)), argnums=(0, 1)),
    "grad(vmap)": lambda f: mx.grad(each_row(f), argnums=(0, 1)),
    "compile(grad(vmap))": lambda f: mx.compile(mx.grad(each_row(f), argnums=(0, 1))),
    "vmap(grad)": lambda f: mx.vmap(mx.grad(loss(f), argnums=(0, 1)), in_axes=(0, None)),
    "compile(vmap(grad))": lambda f: mx.compile(
        mx.vmap(mx.grad(loss(f), argnums=(0, 1)), in_axes=(0, None))
    ),
    "grad(grad)": lambda f: mx.grad(
        lambda x, weight: (mx.grad(loss(f))(x, weight) ** 2).sum(), argnums=(0, 1)
    ),
}


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradient_is_that_of_the_reference(function: str, transform: str) -> None:
    got = TRANSFORMS[transform](FUNCTIONS[function])(X, WEIGHT)
    want = TRANSFORMS[transform](reference)(X, WEIGHT)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert mx.allclose(g, w, rtol=1e-5, atol=1e-6)


def test_a_given_backward_is_used() -> None:
    calls.clear()
    mx.grad(loss(FUNCTIONS["backward"]))(X, WEIGHT)
    assert calls == ["backward"]


@pytest.mark.parametrize("axis", [0, 1])
def test_values_under_vmap(axis: int) -> None:
    got = mx.vmap(FUNCTIONS["reference"], in_axes=(axis, None, None))(X, mx.array(2.0), mx.array(1))
    want = mx.vmap(reference, in_axes=(axis, None, None))(X, mx.array(2.0), mx.array(1))
    for g, w in zip(got, want, strict=True):
        assert mx.array_equal(g, w)


def test_one_argument_and_one_result() -> None:
    square = with_reference_gradient(lambda x: mx.stop_gradient(x * x), lambda x: x * x)
    assert mx.array_equal(mx.grad(lambda x: square(x).sum())(WEIGHT), 2 * WEIGHT)
    assert mx.array_equal(mx.vmap(mx.grad(square))(WEIGHT), 2 * WEIGHT)
    assert mx.array_equal(mx.grad(lambda x: mx.vmap(square)(x).sum())(WEIGHT), 2 * WEIGHT)


def test_what_mlx_cannot_map_raises() -> None:
    quantized = mx.quantize(mx.ones((4, 64)), group_size=32, bits=2)
    product = with_reference_gradient(
        lambda x: mx.quantized_matmul(x, *quantized, group_size=32, bits=2),
        lambda x: x @ mx.dequantize(*quantized, group_size=32, bits=2).T,
    )
    with pytest.raises(RuntimeError, match="vmap"):
        mx.grad(lambda x: mx.vmap(product)(x).sum())(mx.ones((3, 2, 64)))
