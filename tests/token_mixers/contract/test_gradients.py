"""Gradients against differences of the results, for every mixer found in the package."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.mixer import TokenMixer
from tests.token_mixers.contract.cases import (
    ALL,
    SMOOTH,
    Case,
    beside,
    by_case,
    rounds_keys,
    sequence,
    variants_file,
)
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

STEPS = (2.0**-7, 2.0**-10, 2.0**-13)
"""A derivative lies between the differences to both sides, also where a rectified number changes sign,
but for what falls with the square of the step: below 1e-3 at the first one unless results are steep."""

DIFFERENCE_TOLERANCE = 5e-3

NOISE = 3e-7
"""Error of a result in float32, of sums of up to a hundred terms, over its size."""


def _arrays(mixer: TokenMixer, noise: float = 0.0) -> dict[str, mx.array]:
    """The input and all parameters that are trained, with noise, so that none is 0 or 1 throughout."""
    arrays = {"x": sequence(), **{f"beside.{n}": array for n, array in beside(mixer).items()}}
    for number, (path, array) in enumerate(tree_flatten(mixer.trainable_parameters())):
        drawn = mx.random.normal(array.shape, key=mx.random.key(50 + number))
        arrays[f"own.{path}"] = array + noise * drawn
    return arrays


def _result(
    mixer: TokenMixer, arrays: dict[str, mx.array], valid: mx.array | None = None
) -> mx.array:
    parts: dict[str, Any] = tree_unflatten(list(arrays.items()))
    mixer.update(parts.get("own", {}))
    return mixer(parts["x"], None, valid, **parts.get("beside", {}))[0]


@by_case(ALL)
def test_gradients_are_finite_and_reach_every_parameter(case: Case) -> None:
    mixer = case.build()
    arrays = _arrays(mixer)
    gradients = mx.grad(lambda arrays: (_result(mixer, arrays) ** 2).sum())(arrays)
    for path, gradient in gradients.items():
        assert mx.isfinite(gradient).all().item(), path
        assert mx.abs(gradient).max().item() > 0, path


@by_case([case for case in SMOOTH if not rounds_keys(case.values[0])])
def test_gradients_are_those_of_differences(case: Case) -> None:
    """For each array along one direction, which changes all its numbers in proportion to their size."""
    exact = getattr(variants_file(case.kind), "EXACT_GRADIENT", {})
    mixer = case._replace(options=case.options | exact).build()
    arrays = _arrays(mixer, 0.1)
    weights = mx.cos(mx.arange(arrays["x"].size)).reshape(arrays["x"].shape)

    def loss(arrays: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        y = _result(mixer, arrays) * weights
        return y.sum(), y

    (_, y), gradients = mx.value_and_grad(loss)(arrays)
    noise = NOISE * mx.sqrt(y.square().sum()).item()
    modules = dict(mixer.named_modules())
    for number, (path, array) in enumerate(arrays.items()):
        layer = modules.get(path.removeprefix("own.").rpartition(".")[0])
        if isinstance(layer, BitLinear) and path.endswith(".weight"):
            continue  # rounding is passed straight through, which differences do not see
        size = mx.sqrt(mx.mean(array.square()))
        direction = size * mx.random.normal(array.shape, key=mx.random.key(number))
        shares = np.array(gradients[path] * direction, np.float64)
        # of the size that a sum of shares with random signs has, since they may cancel
        scale = np.sqrt((shares**2).sum())
        errors = []
        for step in STEPS:
            sides = []
            for sign in (1, -1):
                end = loss(arrays | {path: array + sign * step * direction})[1]
                change = np.array(end, np.float64) - np.array(y, np.float64)
                sides.append(sign * change.sum() / step)
            error = abs(shares.sum() - np.clip(shares.sum(), min(sides), max(sides)))
            errors.append(error / (DIFFERENCE_TOLERANCE * scale + noise / step))
            if errors[-1] <= 1:
                break
        assert min(errors) <= 1, (path, errors)


# keys that are stored in few bits have no gradient
@by_case([case for case in ALL if not rounds_keys(case.values[0])])
def test_a_row_of_padding_alone_adds_nothing(case: Case) -> None:
    """A batch is filled up with such rows. Their results are finite and count for nothing."""
    mixer = case.build()
    arrays, rows = _arrays(mixer, 0.1), mx.array([0, 2])
    valid = mx.broadcast_to((mx.arange(3) != 1)[:, None], arrays["x"].shape[:2])

    def loss(arrays: dict[str, mx.array], valid: mx.array) -> tuple[mx.array, mx.array]:
        y = _result(mixer, arrays, valid)
        return mx.where(valid[..., None], y, 0.0).square().sum(), y

    (_, y), got = mx.value_and_grad(loss)(arrays, valid)
    fewer = {n: a[rows] if n.startswith(("x", "beside")) else a for n, a in arrays.items()}
    (_, alone), want = mx.value_and_grad(loss)(fewer, valid[rows])
    assert mx.isfinite(y).all().item()
    assert relative_error(y[rows], alone) <= TOLERANCE[mx.float32]
    # sums may cancel, as for the bias of keys under a softmax
    least = 1e-3 * max(mx.abs(gradient).max().item() for gradient in want.values())
    for path, gradient in got.items():
        assert mx.isfinite(gradient).all().item(), path
        part = gradient[rows] if path.startswith(("x", "beside")) else gradient
        scale = max(least, mx.abs(want[path]).max().item())
        assert mx.abs(part - want[path]).max().item() <= GRADIENT_TOLERANCE * scale, path


@by_case(SMOOTH)
def test_numbers_between_the_projections_may_go_beyond_float16(case: Case) -> None:
    mixer, x = case.build(), 300.0 * sequence()
    given = beside(mixer)
    want = mixer(x, **given)[0]
    if mx.abs(want).max().item() > 8000:
        return  # the result, or what the last projection gets, would not fit either
    mixer.set_dtype(mx.float16)
    given = {name: array.astype(mx.float16) for name, array in given.items()}

    def result(x: mx.array) -> mx.array:
        return mixer(x.astype(mx.float16), **given)[0].astype(mx.float32)

    assert mx.isfinite(result(x)).all().item()
    assert mx.isfinite(mx.grad(lambda x: result(x).mean())(x)).all().item()
