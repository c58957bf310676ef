"""The contract of spatial mixers, for every mixer found in the package."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import mlx_mmfree.spatial_mixers as package
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.mixer import SpatialMixer
from tests.tolerances import TOLERANCE, relative_error

DIMS = 32
LINEARS = {"dense": nn.Linear, "ternary": partial(BitLinear, norm_eps=1e-6)}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "WindowAttention": [
        {"window": 4},
        {"window": 4, "shift": 2},
        {"window": 3, "shift": 1, "pads_first": False, "num_heads": 2, "bias": False},
    ],
    "AdditiveAttention": [{}, {"num_heads": 2, "weights": "ones"}],
    "ConvolutionalModulation": [{"kernel_size": 3}, {}],
    "CrossCovarianceAttention": [{}, {"is_stacked": True}],
    "MultiScaleAttention": [{"head_dim": 8}, {"head_dim": 8, "scales": (3, 5)}],
}


def _mixers() -> Iterator[type[SpatialMixer]]:
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        for _, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, SpatialMixer) and value.__module__ == module.__name__:
                yield value


MIXERS = [
    pytest.param(mixer, options, id=f"{mixer.__name__}-{options or 'plain'}")
    for mixer in _mixers()
    for options in OPTIONS.get(mixer.__name__, [{}])
]
each_mixer = pytest.mark.parametrize(("mixer", "options"), MIXERS)
each_linear = pytest.mark.parametrize("linear", LINEARS)


def made(mixer: type[SpatialMixer], options: dict[str, Any], linear: str) -> SpatialMixer:
    mx.random.seed(1)
    kind = cast("Any", mixer)
    each: SpatialMixer = kind(DIMS, linear=LINEARS[linear], **options).eval()
    return each


@pytest.mark.sample(1, of="mixer")
@each_mixer
@each_linear
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (7, 6), (1, 9), (13, 2)])
def test_shape_and_dtype_are_kept(
    mixer: type[SpatialMixer], options: dict[str, Any], linear: str, size: tuple[int, int]
) -> None:
    each = made(mixer, options, linear)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        x = mx.random.normal((2, *size, DIMS)).astype(dtype)
        y = each(x)
        assert y.shape == x.shape and y.dtype == dtype
        assert not mx.any(mx.isnan(y)).item()


@each_mixer
@each_linear
def test_maps_of_a_batch_are_apart(
    mixer: type[SpatialMixer], options: dict[str, Any], linear: str
) -> None:
    each = made(mixer, options, linear)
    x = mx.random.normal((3, 7, 6, DIMS))
    alone = mx.concatenate([each(x[n : n + 1]) for n in range(3)])
    assert relative_error(each(x), alone) < TOLERANCE[mx.float32]


@each_mixer
def test_gradients_are_those_of_finite_differences(
    mixer: type[SpatialMixer], options: dict[str, Any]
) -> None:
    each = made(mixer, options, "dense")
    x, w = mx.random.normal((2, 5, 6, DIMS)), mx.random.normal((2, 5, 6, DIMS))

    def loss(x: mx.array) -> mx.array:
        return (each(x) * w).sum()

    # one position alone, so that few rectified numbers change their sign
    toward = mx.zeros_like(x)
    toward[0, 2, 3] = mx.random.normal((DIMS,))
    gradient = mx.grad(loss)(x)
    slope = (gradient * toward).sum().item()
    step = 3e-3
    change = each(x + step * toward) - each(x - step * toward)
    wanted = (change * w).sum().item() / (2 * step)
    # the slope along a random direction is about as large as the gradient is long
    assert abs(slope - wanted) < 1e-2 * mx.linalg.norm(gradient[0, 2, 3]).item()


@each_mixer
def test_every_parameter_has_a_gradient(mixer: type[SpatialMixer], options: dict[str, Any]) -> None:
    each = made(mixer, options, "dense")
    x, w = mx.random.normal((2, 5, 6, DIMS)), mx.random.normal((2, 5, 6, DIMS))
    if not each.trainable_parameters():
        return
    _, gradients = nn.value_and_grad(each, lambda: (each(x) * w).sum())()
    unused = {"query_weight"} if options.get("weights") == "ones" else set()
    for name, gradient in tree_flatten(gradients):
        assert name in unused or mx.abs(gradient).max().item() > 0, name


@each_mixer
def test_gradients_of_zeros_are_finite(mixer: type[SpatialMixer], options: dict[str, Any]) -> None:
    each = made(mixer, options, "dense")
    weights = tree_flatten(each.parameters())
    zeros = [(name, mx.zeros_like(x)) for name, x in weights if name.endswith("bias")]
    each.load_weights(zeros, strict=False)
    gradient = mx.grad(lambda x: each(x).square().sum() + each(x).sum())(mx.zeros((1, 3, 4, DIMS)))
    assert mx.all(mx.isfinite(gradient)).item()


@each_mixer
def test_what_is_no_map_is_refused(mixer: type[SpatialMixer], options: dict[str, Any]) -> None:
    each, name = made(mixer, options, "dense"), mixer.__name__
    with pytest.raises(ValueError, match=rf"\[{name}\] 'x' must have the four axes .* x\[None\]"):
        each(mx.zeros((5, 4, DIMS)))
    with pytest.raises(ValueError, match=rf"\[{name}\] 'x' must have {DIMS} values"):
        each(mx.zeros((1, 5, 4, DIMS + 1)))
    with pytest.raises(ValueError, match=rf"\[{name}\] 'x' must have at least one position"):
        each(mx.zeros((1, 0, 4, DIMS)))
    with pytest.raises(TypeError, match=rf"\[{name}\] 'x' must hold floats"):
        each(mx.zeros((1, 5, 4, DIMS), mx.int32))


@each_mixer
def test_it_says_what_it_computes(mixer: type[SpatialMixer], options: dict[str, Any]) -> None:
    assert mixer.equation and mixer.complexity and mixer.paper.startswith("arXiv ")
