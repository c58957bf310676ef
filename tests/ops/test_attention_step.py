"""Attention of one token in one launch of Metal, against its formula in float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops import attention_step, use_backend
from mlx_mmfree.ops.attention.metal_step import MAX_SLOTS
from mlx_mmfree.ops.attention_step import held_positions, slots_after
from tests.emulator.emulator import Emulator
from tests.ops.planting import BARRIER, SIMD_BARRIER, Fault, assert_seen
from tests.tolerances import TOLERANCE, relative_error

Given = dict[str, Any]
ALL = {"rotated": 48, "is_normed": True, "is_gated": True}


def arguments(
    lengths: list[int],
    heads: tuple[int, int] = (2, 3),
    dims: int = 64,
    *,
    dtype: mx.Dtype = mx.float32,
    stored: mx.Dtype | None = None,
    window: int | None = None,
    sinks: int = 0,
    rotated: int = 0,
    is_interleaved: bool = False,
    is_normed: bool = False,
    is_gated: bool = False,
) -> Given:
    """Rows that have read these numbers of tokens, with some room left."""
    mx.random.seed(sum(lengths) + dims)
    batch, (groups, shared) = len(lengths), heads
    count = groups * shared
    used = slots_after(0, max(lengths), window, sinks)
    shape = (batch, groups, used + 2, dims)
    keys, values = (mx.random.normal(shape).astype(stored or dtype) for _ in range(2))
    width = (count * (1 + is_gated) + 2 * groups) * dims
    given: Given = {
        "projected": mx.random.normal((batch, 1, width)).astype(dtype),
        "keys": keys,
        "values": values,
        "positions": held_positions(mx.array(lengths), used, window, sinks).astype(mx.int32),
        **{"num_heads": count, "window": window, "sinks": sinks, "is_gated": is_gated},
    }
    if rotated:
        waves = mx.power(1e4, mx.arange(0, rotated, 2) / rotated)
        given |= {"wavelengths": waves, "is_interleaved": is_interleaved}
    if is_normed:
        norms = (1 + mx.random.normal((2, dims)) / 8).astype(dtype)
        given |= {"query_norm": norms[0], "key_norm": norms[1], "norm_eps": 1e-5}
    return given


def _floats(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def _rotated(x: np.ndarray, position: int, given: Given) -> np.ndarray:
    if "wavelengths" not in given:
        return x
    angles = position / _floats(given["wavelengths"])
    count, y = angles.size, x.copy()
    first = slice(0, 2 * count, 2) if given["is_interleaved"] else slice(count)
    second = slice(1, 2 * count, 2) if given["is_interleaved"] else slice(count, 2 * count)
    a, b = x[:, first], x[:, second]
    y[:, first] = a * np.cos(angles) - b * np.sin(angles)
    y[:, second] = a * np.sin(angles) + b * np.cos(angles)
    return y


def _normed(x: np.ndarray, weight: mx.array | None, eps: float) -> np.ndarray:
    if weight is None:
        return x
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * _floats(weight)


def by_formula(given: Given, lengths: list[int]) -> np.ndarray:
    """The results `(B, H K)`, of a token in the slot that is free or the oldest of a full window."""
    heads, dims = given["num_heads"], given["keys"].shape[3]
    groups, window, sinks = given["keys"].shape[1], given["window"], given["sinks"]
    found = []
    for row, length in enumerate(lengths):
        token = _floats(given["projected"][row, 0]).reshape(-1, dims)
        gates = np.full((heads, dims), np.inf)
        if given["is_gated"]:
            queries, gates, token = (
                token[: 2 * heads : 2],
                token[1 : 2 * heads : 2],
                token[2 * heads :],
            )
        else:
            queries, token = token[:heads], token[heads:]
        eps = given.get("norm_eps", 0.0)
        q = _rotated(_normed(queries, given.get("query_norm"), eps), length, given)
        k = _rotated(_normed(token[:groups], given.get("key_norm"), eps), length, given)
        keys, values = (_floats(given[name][row]) for name in ("keys", "values"))
        slot, used = length, length
        if window is not None and length >= sinks + window:
            slot, used = sinks + (length - sinks) % window, sinks + window
        keys[:, slot], values[:, slot] = k, token[groups:]
        count = max(used, slot + 1)
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = keys[group, :count] @ q[head] / np.sqrt(dims)
            weights = np.exp(scores - scores.max())
            read = weights / weights.sum() @ values[group, :count]
            outputs.append(read / (1 + np.exp(-gates[head])))
        found.append(np.concatenate(outputs))
    return np.stack(found)


def check(lengths: list[int], heads: tuple[int, int] = (2, 3), dims: int = 64, **kind: Any) -> None:
    given = arguments(lengths, heads, dims, **kind)
    with use_backend("metal"):
        got = attention_step(**given)
    with use_backend("reference"):
        want = attention_step(**given)
    tolerance = max(TOLERANCE[given["projected"].dtype], TOLERANCE[given["keys"].dtype])
    formula = mx.array(by_formula(given, lengths))[:, None]
    assert got[0].dtype == given["projected"].dtype
    assert relative_error(got[0], formula) <= tolerance
    for g, w in zip(got[1:3], want[1:3], strict=True):
        assert g.dtype == w.dtype and relative_error(g, w) <= tolerance
    assert mx.array_equal(got[3], want[3])


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind", [{}, {"rotated": 64}, {"rotated": 64, "is_interleaved": True}, {"is_normed": True}, ALL]
)
def test_equals_the_formula(metal: None, kind: Given, dtype: mx.Dtype) -> None:
    check([37, 1], dtype=dtype, **kind)


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize(
    ("lengths", "heads", "dims"),
    [([0], (1, 1), 32), ([3], (4, 1), 128), ([200], (1, 6), 256), ([15, 16, 17], (1, 2), 96)],
)
def test_sizes(metal: None, lengths: list[int], heads: tuple[int, int], dims: int) -> None:
    check(lengths, heads, dims, **ALL | {"rotated": min(48, dims)})


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize(("window", "sinks"), [(7, 0), (1, 0), (5, 2), (40, 0)])
def test_windows(metal: None, window: int, sinks: int) -> None:
    rotated = 0 if sinks else 48
    check([30], window=window, sinks=sinks, rotated=rotated)
    check([2, 19], window=window, sinks=sinks, rotated=rotated)


@pytest.mark.metal
def test_a_cache_in_another_dtype(metal: None) -> None:
    check([20], stored=mx.float16, **ALL)


@pytest.mark.metal
def test_each_slot_is_read_once_for_a_head(emulated: Emulator) -> None:
    given = arguments([100], (1, 1), **ALL)
    with use_backend("metal"):
        mx.eval(attention_step(**given))
    record, row = emulated.records[-1], 64 * 4
    # not the token's own slot
    assert record.loaded["keys"] == record.loaded["values"] == 100 * row
    assert record.stored["new_keys"] == record.stored["new_values"] == row


@pytest.mark.metal
@pytest.mark.parametrize(("dims", "slots"), [(40, 8), (288, 8), (64, MAX_SLOTS + 1)])
def test_what_mlx_computes(emulated: Emulator, dims: int, slots: int) -> None:
    given = arguments([slots - 1], (1, 1), dims)
    launched = len(emulated.records)
    with use_backend("metal"):
        got = attention_step(**given)
    mx.eval(got)
    assert not any("new_keys" in each.stored for each in emulated.records[launched:])
    check([slots - 1], (1, 1), dims)


@pytest.mark.metal
def test_gradient(metal: None) -> None:
    given = arguments([5], **ALL)

    def loss(projected: mx.array, keys: mx.array) -> mx.array:
        y, *_ = attention_step(**given | {"projected": projected, "keys": keys})
        return (y * mx.cos(mx.arange(y.size)).reshape(y.shape)).sum()

    arrays = given["projected"], given["keys"]
    with use_backend("metal"):
        got = mx.grad(loss, argnums=(0, 1))(*arrays)
    with use_backend("reference"):
        want = mx.grad(loss, argnums=(0, 1))(*arrays)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) <= 1e-5


def step() -> None:
    check([37, 20], **ALL)


def window() -> None:
    check([30], window=7)


def unfilled() -> None:
    check([2, 19], window=7)


def other_lanes() -> None:
    check([33], (1, 1), 96, rotated=90)


def one_row() -> None:
    check([33], (1, 1), 64, rotated=64, is_interleaved=True)


FAULTS = {
    "barrier behind the norm": Fault(other_lanes, SIMD_BARRIER, "", 0),
    "barrier behind the rotation": Fault(step, BARRIER, "", 0),
    "barrier before sums": Fault(step, BARRIER, "", 1),
    "norm of the key for the query": Fault(
        step, "group == 0 ? query_norm", "group == 1 ? query_norm", 0
    ),
    "rotation the other way": Fault(step, "a * cosine - b", "a * cosine + b", 0),
    "pairs are halves of the head": Fault(step, ": PAIRS);", ": DIMS / 2);", 0),
    "pairs never neighbours": Fault(one_row, "INTERLEAVED ? 2 * pair", "false ? 2 * pair", 0),
    "angles of the first row": Fault(step, "== 1 ? 0 : row * PAIRS", "> 0 ? 0 : row * PAIRS", 0),
    "slot of the first row": Fault(step, "== 1 ? 0 : row]", "> 0 ? 0 : row]", 0),
    "scale": Fault(step, "precise::rsqrt(static_cast<float>(DIMS));", "1.0f;", 0),
    "own slot from the cache": Fault(window, "place != slot &&", "", 0),
    "tokens behind the last are seen": Fault(step, "min(count, slot)", "count", 0),
    "free slots are seen": Fault(unfilled, "seen[place] >= 0", "seen[place] >= -1", 0),
    "key of another head": Fault(
        step, "row * groups + key_head) * room", "row * groups) * room", 0
    ),
    "sums not rescaled": Fault(step, "sum[n] * kept", "sum[n]", 0),
    "total not rescaled": Fault(step, "total * kept", "total", 0),
    "a SIMD group left out": Fault(
        step, "g < SIMD_GROUPS; g++) all", "g < SIMD_GROUPS - 1; g++) all", 0
    ),
    "no gate": Fault(step, "if (GATED) read", "if (false) read", 0),
    "gate of the query": Fault(step, "(2 * head + 1) * DIMS", "(2 * head) * DIMS", 0),
    "values behind the keys of one head": Fault(
        step, "groups + key_head) * DIMS;", "groups) * DIMS;", 0
    ),
}


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_metal_are_seen(
    name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_seen(FAULTS[name], "attention_step", emulated, monkeypatch)
