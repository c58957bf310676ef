"""Attention of one token to a cache and a tail, against its formula in float64."""

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import attention_step, use_backend
from mlx_mmfree.ops import attention_tail as ops_attention_tail
from mlx_mmfree.ops.attention import metal_step
from mlx_mmfree.ops.attention_step import Options, slot_positions, slots_after
from mlx_mmfree.ops.attention_tail import Tail, attention_tail, join_tail
from tests.emulator.emulator import Emulator
from tests.ops.planting import BARRIER, SIMD_BARRIER, Fault, assert_seen
from tests.tolerances import TOLERANCE, relative_error

Given = dict[str, Any]
ALL = {"rotated": 48, "is_normed": True, "is_gated": True}
SLOTS = 5


def arguments(
    lengths: list[int],
    heads: tuple[int, int] = (2, 3),
    dims: int = 64,
    *,
    count: int = 3,
    dtype: mx.Dtype = mx.float32,
    stored: mx.Dtype | None = None,
    window: int | None = None,
    sinks: int = 0,
    rotated: int = 0,
    is_interleaved: bool = False,
    is_normed: bool = False,
    is_gated: bool = False,
) -> Given:
    """Rows that have read these numbers of tokens, `count` of which are in the tail, and all keys."""
    mx.random.seed(sum(lengths) + dims)
    batch, (groups, shared) = len(lengths), heads
    heads_in_all = groups * shared
    texts = mx.random.normal((2, batch, groups, max(lengths) + 1, dims)).astype(stored or dtype)
    ends = mx.array(lengths) - count
    used = slots_after(0, max(lengths) - count, window, sinks)
    positions = slot_positions(ends, used, window, sinks).astype(mx.int32)
    width = (heads_in_all * (1 + is_gated) + 2 * groups) * dims
    given: Given = {
        "projected": mx.random.normal((batch, 1, width)).astype(dtype),
        "texts": texts,
        "lengths": lengths,
        "positions": positions,
        "tail": Tail(*_of(texts, ends[:, None] + mx.arange(SLOTS)), mx.array([count], mx.int32)),
        **{"num_heads": heads_in_all, "window": window, "sinks": sinks, "is_gated": is_gated},
    }
    given["keys"], given["values"] = (
        mx.pad(each, FREE, constant_values=9.0) for each in _of(texts, positions)
    )
    if rotated:
        waves = mx.power(1e4, mx.arange(0, rotated, 2) / rotated)
        given |= {"wavelengths": waves, "is_interleaved": is_interleaved}
    if is_normed:
        norms = (1 + mx.random.normal((2, dims)) / 8).astype(dtype)
        given |= {"query_norm": norms[0], "key_norm": norms[1], "norm_eps": 1e-5}
    return given


# free slots, of which nothing must be read
FREE = [(0, 0), (0, 0), (0, 2), (0, 0)]


def _of(texts: mx.array, positions: mx.array) -> list[mx.array]:
    """The keys and values of these positions of each row, 9 for none."""
    found = []
    for each in texts:
        index = mx.clip(positions, 0, each.shape[2] - 1)[:, None, :, None]
        own = mx.take_along_axis(each, index, axis=2)
        found.append(mx.where(positions[:, None, :, None] < 0, mx.array(9, each.dtype), own))
    return found


def tailed(given: Given) -> tuple[mx.array, Tail]:
    options = Options(
        given["num_heads"],
        given.get("wavelengths"),
        given.get("is_interleaved", False),
        given.get("query_norm"),
        given.get("key_norm"),
        given.get("norm_eps", 1e-6),
        given["window"],
        given["sinks"],
        is_gated=given["is_gated"],
    )
    free = [(0, 0), (0, FREE[2][1])]
    positions = mx.pad(given["positions"], free, constant_values=-1)
    arrays = given["projected"], given["keys"], given["values"]
    return attention_tail(*arrays, positions, given["tail"], options)


def merged_and_attended(given: Given) -> list[mx.array]:
    """The same with the tail in the cache, by `attention_step`."""
    window, sinks, lengths = given["window"], given["sinks"], given["lengths"]
    used = slots_after(0, max(lengths), window, sinks)
    capacity = slots_after(0, max(lengths) + 1, window, sinks)
    missing = capacity - given["positions"].shape[1]
    keys, values = (
        mx.pad(given[each][:, :, :-2], [(0, 0), (0, 0), (0, missing), (0, 0)])
        for each in ("keys", "values")
    )
    positions = mx.pad(given["positions"], [(0, 0), (0, missing)], constant_values=-1)
    count = given["tail"].used.item()
    cache = join_tail(keys, values, positions, given["tail"], count, window, sinks)
    slots_before = slot_positions(mx.array(lengths), used, window, sinks)
    assert mx.array_equal(cache[2][:, :used], slots_before)
    left_out = ("texts", "lengths", "tail", "positions", "keys", "values", "projected")
    options = {name: each for name, each in given.items() if name not in left_out}
    return attention_step(given["projected"], *cache[:2], cache[2][:, :used], **options)


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


def by_formula(given: Given) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The results `(B, H K)` of a token, its keys and its values `(B, G, K)`."""
    heads, (groups, _, dims) = given["num_heads"], given["texts"].shape[2:]
    window, sinks = given["window"], given["sinks"]
    found: list[list[np.ndarray]] = [[], [], []]
    for row, length in enumerate(given["lengths"]):
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
        keys, values = (_floats(each[row][:, : length + 1]) for each in given["texts"])
        keys[:, length], values[:, length] = k, token[groups:]
        position = np.arange(length + 1)
        seen = position > length - (window or length + 1)
        seen |= position < sinks
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = keys[group, seen] @ q[head] / np.sqrt(dims)
            weights = np.exp(scores - scores.max())
            read = weights / weights.sum() @ values[group, seen]
            outputs.append(read / (1 + np.exp(-gates[head])))
        for each, own in zip(found, (np.concatenate(outputs), k, token[groups:]), strict=True):
            each.append(own)
    results, keys, values = (np.stack(each) for each in found)
    return results, keys, values


def check(
    lengths: list[int],
    heads: tuple[int, int] = (2, 3),
    dims: int = 64,
    *,
    parts: int = 1,
    **kind: Any,
) -> None:
    given = arguments(lengths, heads, dims, **kind)
    before, count = given["tail"], given["tail"].used.item()
    with use_backend("metal"), patch.object(ops_attention_tail, "parts_of", lambda *_: parts):
        got = tailed(given)
    with use_backend("reference"):
        want = tailed(given)
        merged, *_ = merged_and_attended(given)
    dtypes = given["projected"].dtype, given["keys"].dtype
    tolerance = max(TOLERANCE[each] for each in dtypes)
    formula, *own = (mx.array(each) for each in by_formula(given))
    assert relative_error(merged[:, 0], formula) <= tolerance
    for y, tail in (got, want):
        assert y.dtype == dtypes[0] and tail.used.tolist() == [count + 1]
        assert relative_error(y[:, 0], formula) <= tolerance
        for new, old, row in zip(tail[:2], before[:2], own, strict=True):
            assert new.dtype == dtypes[1] and new.shape == old.shape
            others = mx.arange(SLOTS) != count
            assert mx.all((new == old).swapaxes(2, 3) | ~others).item()
            assert relative_error(new[:, :, count], row) <= tolerance


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "kind", [{}, {"rotated": 64}, {"rotated": 64, "is_interleaved": True}, {"is_normed": True}, ALL]
)
def test_equals_the_formula(metal: None, kind: Given, parts: int, dtype: mx.Dtype) -> None:
    check([37, 4], dtype=dtype, parts=parts, **kind)


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize(
    ("lengths", "heads", "dims", "parts"),
    [
        ([3], (1, 1), 32, 1),
        ([3], (1, 2), 32, 7),
        ([3], (4, 1), 128, 2),
        ([200], (1, 6), 256, 3),
        ([15, 16, 17], (1, 2), 96, 1),
        ([19, 20, 21], (1, 2), 96, 5),
    ],
)
def test_sizes(
    metal: None, lengths: list[int], heads: tuple[int, int], dims: int, parts: int
) -> None:
    check(lengths, heads, dims, parts=parts, **ALL | {"rotated": min(48, dims)})


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("count", [0, 1, 4])
def test_tails(metal: None, count: int) -> None:
    check([29, 8], count=count, parts=1 + count % 2, **ALL)


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize(("window", "sinks"), [(7, 0), (5, 0), (5, 2), (40, 0)])
@pytest.mark.parametrize("parts", [1, 2])
def test_windows(metal: None, window: int, sinks: int, parts: int) -> None:
    rotated = 0 if sinks else 48
    check([30], window=window, sinks=sinks, rotated=rotated, parts=parts)
    check([4, 19], window=window, sinks=sinks, rotated=rotated, parts=parts)


@pytest.mark.metal
def test_a_cache_in_another_dtype(metal: None) -> None:
    check([20], stored=mx.float16, **ALL)


@pytest.mark.metal
@pytest.mark.parametrize("parts", [1, 3])
def test_each_slot_is_read_once_for_a_head(emulated: Emulator, parts: int) -> None:
    given = arguments([100], (1, 1), **ALL)
    with use_backend("metal"), patch.object(ops_attention_tail, "parts_of", lambda *_: parts):
        mx.eval(tailed(given))
    record, row = emulated.records[-1 if parts == 1 else -2], 64 * 4
    assert record.loaded["keys"] == record.loaded["values"] == 97 * row
    # once to attend, and once for the new one
    assert record.loaded["tail_keys"] == record.loaded["tail_values"] == (3 + SLOTS - 1) * row
    assert record.stored["new_keys"] == record.stored["new_values"] == SLOTS * row


@pytest.mark.metal
@pytest.mark.parametrize("dims", [40, 288])
def test_what_mlx_computes(metal: None, dims: int) -> None:
    given = arguments([9], (1, 1), dims)
    with use_backend("metal"), pytest.raises(BackendError, match=f"heads have {dims} dims"):
        tailed(given)
    assert relative_error(tailed(given)[0][:, 0], mx.array(by_formula(given)[0])) <= 1e-5


@pytest.mark.metal
@pytest.mark.parametrize("parts", [1, 2])
def test_gradient(metal: None, parts: int) -> None:
    given = arguments([5], **ALL)

    def loss(projected: mx.array, keys: mx.array) -> mx.array:
        y, tail = tailed(given | {"projected": projected, "keys": keys})
        y = mx.concatenate([y.flatten(), tail.keys.flatten()])
        return (y * mx.cos(mx.arange(y.size))).sum()

    arrays = given["projected"], given["keys"]
    with use_backend("metal"), patch.object(ops_attention_tail, "parts_of", lambda *_: parts):
        got = mx.grad(loss, argnums=(0, 1))(*arrays)
    with use_backend("reference"):
        want = mx.grad(loss, argnums=(0, 1))(*arrays)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) <= 1e-5


@pytest.mark.parametrize("cores", [(8,), (20,), (8, 20), (40,), (80,)], ids=str)
def test_cores_have_even_shares(cores: tuple[int, ...]) -> None:
    for heads in range(1, 129):
        assert metal_step.parts_of(heads, 511, cores) == 1
        for slots in (512, 1024, 4096, 32768):
            parts = metal_step.parts_of(heads, slots, cores)
            assert parts <= -(-4 * max(cores) // heads)
            for count in cores if slots < 4096 else range(1, max(cores) + 1):
                busiest = -(-heads * parts // count)
                assert busiest * count <= 1.25 * heads * parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "'tail' must have keys and values"),
        ({"slots": 3, "window": 2}, "a window of 2"),
        ({"used": 3}, r"'positions' must have shape \(1, 4\)"),
        ({"used": 5}, "a slot for each of 'positions'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, int], message: str) -> None:
    given = {"slots": 2, "used": 4, "window": None} | change
    keys = mx.zeros((1, 1, 4, 8))
    tail, positions = Tail.empty(keys, given["slots"]), mx.zeros((1, given["used"]), mx.int32)
    options = Options(2, window=given["window"])
    with use_backend("reference"), pytest.raises(ValueError, match=message):
        attention_tail(mx.ones((1, 1, 32)), keys, keys, positions, tail, options)


def step() -> None:
    check([37, 20], **ALL)


def in_parts() -> None:
    check([37, 20], parts=2, **ALL)


def with_one_token() -> None:
    check([4], count=1, parts=3)


def window() -> None:
    check([30], window=7)


def other_lanes() -> None:
    check([33], (1, 1), 96, rotated=90)


def one_row() -> None:
    check([33], (1, 1), 64, rotated=64, is_interleaved=True)


# in the text of the whole, but for faults of parts
FAULTS = {
    "barrier after the norm": Fault(other_lanes, SIMD_BARRIER, "", 0),
    "barrier after the rotation": Fault(step, BARRIER, "", 0),
    "barrier before the largest": Fault(step, BARRIER, "", 1),
    "barrier before sums": Fault(step, BARRIER, "", 2),
    "norm of the key for the query": Fault(
        step, "group == 0 ? query_norm", "group == 1 ? query_norm", 0
    ),
    "rotation the other way": Fault(step, "a * cosine - b", "a * cosine + b", 0),
    "pairs are halves of the head": Fault(step, ": PAIRS);", ": DIMS / 2);", 0),
    "pairs never neighbours": Fault(one_row, "INTERLEAVED ? 2 * pair", "false ? 2 * pair", 0),
    "angles of the first row": Fault(step, "== 1 ? 0 : row * PAIRS", "> 0 ? 0 : row * PAIRS", 0),
    "tokens of the first row": Fault(step, "min(starts[row]", "min(starts[0]", 0),
    "scale": Fault(step, "precise::rsqrt(static_cast<float>(DIMS));", "1.0f;", 0),
    "free slots are seen": Fault(step, "min(starts[row], room)", "room", 0),
    "what left the window is seen": Fault(window, "!WINDOWED || seen", "true || seen", 0),
    "key of another head": Fault(step, "keys + own * room", "keys + row * groups * room", 0),
    "tail of another head": Fault(step, "tail = own * slots", "tail = row * groups * slots", 0),
    "tail left out": Fault(step, "place < tokens; place", "place < 0; place", 0),
    "free slots of the tail are seen": Fault(
        step, "place < tokens; place", "place < slots; place", 0
    ),
    "own key in another slot": Fault(step, "if (place == tokens)", "if (place == tokens + 1)", 0),
    "key for a value": Fault(step, "tail + at, own_value)", "tail + at, own_key)", 0),
    "the end of the tail is not written": Fault(
        step, "head % shared_by == 0 ? slots", "head % shared_by == 0 ? slots - 1", 0
    ),
    "sums not rescaled": Fault(step, "sum[n] * kept + weight", "sum[n] + weight", 0),
    "total not rescaled": Fault(step, "total * kept + weight", "total + weight", 0),
    "sums of SIMD groups not rescaled": Fault(step, "= sum[n] * kept;", "= sum[n];", 0),
    "totals of SIMD groups not rescaled": Fault(step, "= total * kept;", "= total;", 0),
    "a SIMD group left out": Fault(step, "g < SIMD_GROUPS; g++) read", "g < 15; g++) read", 0),
    "no gate": Fault(step, "if (GATED) read", "if (false) read", 0),
    "gate of the query": Fault(step, "(2 * head + 1) * DIMS", "(2 * head) * DIMS", 0),
    "values after the keys of one head": Fault(
        step, "groups + key_head) * DIMS;", "groups) * DIMS;", 0
    ),
}
FAULTS_OF_PARTS = {
    "slots of the first part": Fault(in_parts, "SIMD_GROUPS * part + group", "group", 0),
    "slots of every part": Fault(in_parts, "step = SIMD_GROUPS * parts", "step = SIMD_GROUPS", 0),
    "nothing read gives NaN": Fault(with_one_token, "most == -INFINITY ? 0.0f", "false ? 0.0f", 0),
    "sums of the first part": Fault(in_parts, "* parts + part) * DIMS", "* parts) * DIMS", 0),
    "scale of the first part": Fault(in_parts, "parts + part)] = top", "parts)] = top", 0),
}
FAULTS_OF_JOIN = {
    "a part left out": Fault(in_parts, "part < parts; part++) {", "part < parts - 1; part++) {", 0),
    "parts not rescaled": Fault(in_parts, "precise::exp(own[2 * part] - top)", "1.0f", 0),
    "parts of another head": Fault(
        in_parts, "scales + 2 * (row * heads + head)", "scales + 2 * row", 0
    ),
    "no gate": Fault(in_parts, "if (GATED) {", "if (false) {", 0),
}
ALL_FAULTS = [
    *(("attention_step_", *each) for each in FAULTS.items()),
    *(("attention_step_parts", *each) for each in FAULTS_OF_PARTS.items()),
    *(("attention_step_join", *each) for each in FAULTS_OF_JOIN.items()),
]


@pytest.mark.sample(3)
@pytest.mark.metal
@pytest.mark.parametrize(
    ("kernel", "name", "fault"),
    ALL_FAULTS,
    ids=[f"{kernel} {name}" for kernel, name, _ in ALL_FAULTS],
)
def test_faults_of_metal_are_seen(
    kernel: str, name: str, fault: Fault, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_seen(fault, kernel, emulated, monkeypatch)
