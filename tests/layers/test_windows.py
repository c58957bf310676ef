"""Windows: a long call is read in chunks or blocks, which changes nothing but the cost."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.attention import key_values as sequence_blocks
from mlx_mmfree.layers.attention import served as attention
from mlx_mmfree.layers.attention.positions import ALiBi
from mlx_mmfree.layers.quantization import Quantization
from mlx_mmfree.token_mixers import GQA, KeyValueCache
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
DIMS, LENGTH = 32, 41


def _x() -> mx.array:
    return mx.random.normal((3, LENGTH, DIMS), key=mx.random.key(1))


def _layouts() -> dict[str, dict[str, mx.array]]:
    rng = np.random.default_rng(0)
    valid = mx.array(rng.random((3, LENGTH)) < [[0.5], [0.9], [2.0]])
    starts = mx.array(rng.random((3, LENGTH)) < 0.1)
    padded = {"valid": valid}
    return {
        "plain": {},
        "padded": padded,
        "samples": {"starts": starts},
        "both": padded | {"starts": starts},
    }


LAYOUTS = _layouts()
CACHES = {
    "window": KeyValueCache(5),
    "sinks": KeyValueCache(4, sinks=2),
    "steps": KeyValueCache(6, step=3),
    "quantized": KeyValueCache(5, quantization=Quantization(8, 32)),
    "everything": KeyValueCache(),
}


def _mixer(cache: KeyValueCache, **options: Any) -> GQA:
    mx.random.seed(2)
    return GQA(DIMS, num_heads=1, cache=cache, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("positions", [{"rope": RoPE(DIMS)}, {"position_bias": ALiBi(1)}, {}])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_long_call_is_read_in_chunks(
    cache: str, layout: str, positions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer, x, given = _mixer(CACHES[cache], **positions), _x(), LAYOUTS[layout]
    before = mixer(x[:, :7])[1]
    weights = mx.cos(mx.arange(x.size)).reshape(x.shape)

    def run() -> tuple[mx.array, ...]:
        valid = mx.ones(x.shape[:2], mx.bool_)
        # after padding alone, a query may see anything
        seen = given.get("valid", valid)[..., None]
        outputs: list[mx.array] = []
        for state in (None, before):
            y, after = mixer(x, state, **given)
            outputs += [mx.where(seen, y, 0.0), mixer(x[:, :3], after)[0]]
        return tuple(outputs)

    def loss(x: mx.array) -> mx.array:
        y = mixer(x, None, **given)[0]
        return (y * weights).sum()

    want, want_gradient = run(), mx.grad(loss)(x)
    chunks = []
    monkeypatch.setattr(attention, "CHUNK", 4)
    attend = attention.ServedAttention.attend_before

    def noted(self: attention.ServedAttention, projected: mx.array, *rest: Any) -> Any:
        chunks.append(projected.shape[1])
        return attend(self, projected, *rest)

    monkeypatch.setattr(attention.ServedAttention, "attend_before", noted)
    for got, one in zip(run(), want, strict=True):
        assert relative_error(got, one) <= FLOAT32
    if cache != "everything" or "position_bias" in positions:
        assert max(chunks) < 10
    if CACHES[cache].quantization is None:
        assert relative_error(mx.grad(loss)(x), want_gradient) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("size", [2, 7, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", ["window", "steps"])
def test_a_window_on_both_sides_is_seen_in_blocks(
    cache: str, layout: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_blocks, "SMALLEST", size)
    window, step = CACHES[cache].window, CACHES[cache].step
    mixer, x, given = _mixer(CACHES[cache], is_causal=False), _x(), LAYOUTS[layout]
    y, state = mixer(x, **given)
    assert state == ()
    q, k, v = (np.array(mixer[f"{name}_proj"](x)) for name in ("query", "key", "value"))
    starts, valid = (np.array(given.get(name, [])) for name in ("starts", "valid"))
    for row in range(3):
        real = np.flatnonzero(valid[row]) if valid.size else np.arange(LENGTH)
        begins = np.zeros(len(real), int)
        if starts.size:
            begins = np.maximum.accumulate(np.where(starts[row, real], np.arange(len(real)), 0))
        position = np.arange(len(real)) - begins
        block = position // step
        low, high = (block + 1) * step - window, block * step + window
        seen = (position >= low[:, None]) & (position < high[:, None]) & (begins == begins[:, None])
        scores = q[row, real].astype(np.float64) @ k[row, real].T / np.sqrt(DIMS)
        weights = np.exp(np.where(seen, scores, -np.inf))
        weights /= weights.sum(axis=1, keepdims=True)
        want = weights @ v[row, real] @ np.array(mixer.output_proj.weight).T
        assert relative_error(y[row, mx.array(real)], mx.array(want)) <= FLOAT32


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_empty_sequence(is_causal: bool) -> None:
    y, _ = _mixer(CACHES["window"], is_causal=is_causal)(mx.zeros((2, 0, DIMS)))
    assert y.shape == (2, 0, DIMS)
