"""Decoding on Metal copies no cache of keys and values, though a step starts while one is computed.

Kernels are stand-ins on the CPU, which holds what they read until they are through, as a GPU does. They
take so long that a step is always started before the one before is through.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.generation import decode, reader
from mlx_mmfree.generation.decode import Decoding
from mlx_mmfree.generation.states import blank_state
from mlx_mmfree.layers.attention import served
from mlx_mmfree.layers.attention.options import KeyValueCache
from mlx_mmfree.layers.states import TAIL_SLOTS
from mlx_mmfree.models import Decoder, llama
from mlx_mmfree.ops.attention_step import token_heads, write_slots
from mlx_mmfree.ops.backend import launch
from mlx_mmfree.token_mixers import GQA
from tests import graph
from tests.ops.conftest import recorded as recorded

HEADS, DIMS, TOKENS = 4, 128, 1792
ROW = 2 * HEADS * DIMS * 4
CACHE, TAIL = (TOKENS + 256) * ROW, TAIL_SLOTS * ROW
READS = 1


def _model() -> Decoder:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIMS}
    model = llama.build(llama.Config(vocab_size=32, **sizes, **heads))
    mx.eval(model.parameters())
    return model


def _slow_kernel(
    kernel: Any, *, inputs: Any, output_shapes: Any, output_dtypes: Any, **options: Any
) -> list[mx.array]:
    """Stands in for `launch`: reads the cache and the tail several times, one after the other."""
    found: list[mx.array] = []
    for array in [each for each in inputs if each.ndim == 4] * READS:
        # after the one before, so that MLX does not see that it is the same
        found.append(mx.max(mx.depends(array, found[-1:] or [array])))
    return graph.stand_in(output_shapes, output_dtypes, *inputs, *found)


@pytest.fixture
def slow(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", _slow_kernel)
    monkeypatch.setattr(reader, "runs_metal_kernels", lambda: True)
    monkeypatch.setattr(decode, "on_cpu", lambda: False)
    # stand-ins give zeros
    monkeypatch.setattr(reader, "are_finite", lambda logits: mx.array([True]))


def _peak(steps: int, after: Callable[[Decoding, int], None] = lambda decoding, step: None) -> int:
    """The most bytes that decoding takes beside the weights; `after` is called after each step."""
    model = _model()
    decoding = Decoding(model, mx.array([[1]]), state=blank_state(model, 1, TOKENS))
    mx.eval(decoding._reader.arrays)
    mx.synchronize()
    before = mx.get_active_memory() - CACHE
    mx.reset_peak_memory()
    for step in range(steps):
        decoding.step()
        after(decoding, step)
    mx.synchronize()
    return mx.get_peak_memory() - before


@pytest.mark.usefixtures("slow")
def test_no_step_and_no_full_tail_copies_the_cache() -> None:
    assert _peak(3 * TAIL_SLOTS + 8) <= CACHE + 3 * TAIL + 3 * ROW


@pytest.mark.usefixtures("slow")
def test_what_is_put_aside_costs_one_copy() -> None:
    """The next full tail copies the cache that a session shares, and no later one; it has a tail too."""
    aside: list[Any] = []

    def put_aside(decoding: Decoding, step: int) -> None:
        if step == 8:
            aside.append(decoding.state)

    most = 2 * CACHE + 4 * TAIL + 3 * ROW
    assert 2 * CACHE < _peak(3 * TAIL_SLOTS + 8, put_aside) <= most


@pytest.mark.parametrize("window", [{}, {"window": 1024}, {"window": 1000, "sinks": 4}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_full_tails_are_written_in_place(window: dict[str, int], batch: int) -> None:
    """At the slots of each row; three caches take 12 times as much as their tails."""
    cache = KeyValueCache(**window)
    kind = GQA(HEADS * DIMS, num_heads=HEADS, cache=cache).state_kind
    lengths = mx.array([1023, 5, 300][:batch])
    state = kind.blank(batch, 1023, mx.float32)
    positions = mx.where(state.positions < lengths[:, None], state.positions, -1)
    state, _ = kind.fixed(state._replace(positions=positions), 3 * TAIL_SLOTS)
    state = kind.with_tail(state, TAIL_SLOTS)
    mx.eval(state)
    for _ in range(3):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        state = kind.with_tail(kind.without_tail(state, TAIL_SLOTS), TAIL_SLOTS)
        mx.eval(state)
        # the next tail, and where in the cache each number goes
        assert mx.get_peak_memory() - before <= 4 * batch * TAIL
        assert mx.all(mx.max(state.positions, axis=1) >= lengths).item()
        lengths = lengths + TAIL_SLOTS


def _attended_first(
    projected: mx.array, keys: mx.array, values: mx.array, positions: mx.array, options: Any
) -> tuple[mx.array, ...]:
    slot = options.slot()
    new = (*keys.shape[:2], 1, keys.shape[3])
    y, k, v = launch.launch(
        None,
        inputs=[projected, keys, values],
        output_shapes=[(1, 1, HEADS * DIMS), new, new],
        output_dtypes=[projected.dtype, keys.dtype, values.dtype],
    )
    keys, values = write_slots(keys, k, slot.slots), write_slots(values, v, slot.slots)
    return y, keys, values, slot.positions


def _written_first(
    projected: mx.array, keys: mx.array, values: mx.array, positions: mx.array, options: Any
) -> tuple[mx.array, ...]:
    slot = options.slot()
    _, k, v, _ = token_heads(projected, HEADS, slot.lengths, options)
    keys, values = write_slots(keys, k, slot.slots), write_slots(values, v, slot.slots)
    (y,) = launch.launch(
        None,
        inputs=[projected, keys, values],
        output_shapes=[(1, 1, HEADS * DIMS)],
        output_dtypes=[projected.dtype],
    )
    return y, keys, values, slot.positions


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("order", [_attended_first, _written_first])
def test_a_cache_that_each_step_writes_is_copied(
    order: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other orders cost what the test above would see, of one layer whose last step is under way."""
    monkeypatch.setattr(reader, "runs_metal_kernels", lambda: False)
    monkeypatch.setattr(served, "operation", order)
    assert _peak(8) > 1.4 * CACHE + 3 * TAIL + 3 * ROW
