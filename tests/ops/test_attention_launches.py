"""Traffic of the kernels of attention in training, their share of the work, and models with them."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.models import Decoder, find
from mlx_mmfree.ops import attention, use_backend
from mlx_mmfree.ops.backend import self_check
from mlx_mmfree.ops.backend.gradient import assume_gradients
from mlx_mmfree.ops.backend.graph import graph_of
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer_step import checkpoint_blocks
from tests import graph
from tests.emulator.emulator import Emulator
from tests.ops.attention_formula import Sizes, arguments, computed, mask_of
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

THREADGROUP_BYTES = 32 * 1024


@pytest.mark.exhaustive
@pytest.mark.metal
@pytest.mark.usefixtures("traced")
def test_the_bits_do_not_depend_on_the_order_of_threads(emulated: Emulator) -> None:
    sizes = Sizes(40, 70, 32, 32, heads=2)
    arrays, mask, sinks = arguments(sizes), mask_of("rows", sizes), mx.array([0.5, -1.0])
    found = []
    for seed in (0, 1, 2, 3):
        emulated.seed = seed
        y, gradients = computed(arrays, mask, sinks)
        found.append([np.array(x).tobytes() for x in (y, *gradients)])
    assert all(each == found[0] for each in found)


@pytest.mark.exhaustive
@pytest.mark.metal
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("dims", "step"), [(64, 32), (128, 16)])
def test_launches_and_what_they_read(emulated: Emulator, dims: int, step: int) -> None:
    """Four launches, in whose memory there is space for two tiles and strips of scores."""
    sizes = Sizes(70, 70, dims, dims, heads=2)
    arrays = arguments(sizes)
    computed(arrays, None, None)
    emulated.records.clear()
    computed(arrays, None, None)
    forward, sums, of_keys, of_queries = emulated.records
    q, k, _, _ = (array.nbytes for array in arrays)
    blocks = -(-70 // 32)
    # queries and results once; keys and values for each block of queries of each head
    assert forward.loaded["queries"] == forward.stored["result"] == q
    assert forward.loaded["keys"] == forward.loaded["values"] == 2 * blocks * k
    assert sums.loaded["result"] == sums.loaded["cotangent"] == q
    assert of_queries.loaded["queries"] == of_queries.loaded["cotangent"] == q
    assert of_queries.loaded["keys"] == of_queries.loaded["values"] == 2 * blocks * k
    assert of_queries.stored["query_gradient"] == q
    # keys and values once; queries for each block of keys
    assert of_keys.loaded["keys"] == of_keys.loaded["values"] == k
    assert of_keys.loaded["queries"] == of_keys.loaded["cotangent"] == blocks * q
    assert of_keys.stored["key_gradient"] == of_keys.stored["value_gradient"] == k
    tiles = 2 * step * (dims + 4)
    strip = 8 * (step + 4)
    assert forward.shared_bytes == 4 * (tiles + 4 * strip + 4 * 64)
    assert of_keys.shared_bytes == 4 * (tiles + 8 * strip + 2 * step)
    assert of_queries.shared_bytes == 4 * (tiles + 8 * strip)
    assert max(record.shared_bytes for record in emulated.records) <= THREADGROUP_BYTES


@pytest.mark.metal
@pytest.mark.usefixtures("traced")
def test_causal_attention_leaves_out_what_no_query_sees(emulated: Emulator) -> None:
    sizes = Sizes(96, 96)
    arrays = arguments(sizes)
    computed(arrays, "causal", None)
    emulated.records.clear()
    computed(arrays, "causal", None)
    forward, _, of_keys, of_queries = emulated.records
    # of three blocks of 32, the tiles of as many rows on the diagonal and before it
    assert forward.loaded["keys"] == of_queries.loaded["values"] == 2 * arrays[1].nbytes
    assert of_keys.loaded["queries"] == 2 * arrays[0].nbytes


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_gradients_of_a_model(emulated: Emulator, is_packed: bool, has_checkpoints: bool) -> None:
    """With shared keys, padding, samples one after the other, and blocks that are computed again."""
    mx.random.seed(1)
    architecture = find("llama")
    model: Decoder = architecture.build(architecture.config.from_hub(architecture.tiny))
    mx.eval(model.parameters())
    tokens = np.arange(2 * 21, dtype=np.int32).reshape(2, 21) * 7 % 60
    positions = np.arange(20)[None] + np.array([[0], [6]])
    batch = Batch.of_rows(tokens)
    if is_packed:
        valid, starts = positions < 22, positions % 9 == 8
        batch = replace(batch, valid=valid, starts=starts, weights=batch.weights * valid)
    if has_checkpoints:
        checkpoint_blocks(model)
    gradient = nn.value_and_grad(model, next_token_loss)
    with use_backend("reference"):
        want = gradient(model, batch)
        mx.eval(want)
    got = gradient(model, batch)
    kernels = {record.kernel.split("__")[0] for record in emulated.records}
    mask = "_mask" if is_packed else ""
    assert {
        f"custom_kernel_attention_{name}_gradient{mask}" for name in ("key", "query")
    } <= kernels
    for (name, g), (_, w) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert relative_error(g, w) <= GRADIENT_TOLERANCE, name


def _of_bias(x: mx.array) -> mx.array:
    return attention(x, x, x, "causal", bias=mx.zeros((1, 1, *x.shape[2:3], x.shape[2])))


@pytest.mark.metal
@pytest.mark.parametrize(
    ("shape", "function"),
    [
        ((1, 1, 40, 32), _of_bias),
        ((1, 1, 40, 32), lambda x: attention(x, x, x, mx.zeros((40, 40)))),
        ((1, 1, 15, 32), lambda x: attention(x, x, x)),
        ((1, 1, 16, 130), lambda x: attention(x, x, x)),
    ],
    ids=["bias", "numbers as a mask", "few queries", "many dims"],
)
@pytest.mark.usefixtures("traced")
def test_what_is_left_to_mlx(
    shape: tuple[int, ...], function: Callable[[mx.array], mx.array], emulated: Emulator
) -> None:
    x = mx.random.normal(shape)
    with use_backend("metal"):
        mx.eval(mx.grad(lambda x: function(x).sum())(x))
    assert not emulated.records


@pytest.mark.metal
@pytest.mark.usefixtures("metal")
def test_inference_is_left_to_mlx(emulated: Emulator) -> None:
    q, k, v, _ = arguments(Sizes(20, 40))
    with assume_gradients(False), use_backend("metal"):
        mx.eval(attention(q, k, v, "causal"))
    assert not emulated.records


@pytest.mark.metal
@pytest.mark.usefixtures("traced")
def test_a_wrong_kernel_is_switched_off(
    emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "_checks", {})
    emulated.edit = lambda text: text.replace("weight * slope", "weight * slope * 1.1f")
    q, k, v, _ = arguments(Sizes(20, 40))
    with pytest.warns(RuntimeWarning, match="The kernel attention_gradient.* is switched off"):
        y = attention(q, k, v, "causal")
    emulated.records.clear()
    with use_backend("reference"):
        assert relative_error(y, attention(q, k, v, "causal")) <= TOLERANCE[mx.float32]
    mx.eval(mx.grad(lambda q: attention(q, k, v, "causal").sum())(q))
    assert not emulated.records


@pytest.mark.usefixtures("recorded", "traced")
def test_no_array_of_training_holds_all_weights() -> None:
    """Of 2,048 tokens, 4 million weights a head."""
    length = 2048
    q, k, v, given = arguments(Sizes(length, length, heads=2))
    mx.eval(q, k, v, given)

    def largest(backend: str) -> int:
        with use_backend(backend):
            results, gradients = mx.vjp(lambda *a: attention(*a, "causal"), [q, k, v], [given])
        return max(array.nbytes for array in graph_of([*results, *gradients]).arrays)

    assert largest("metal") == q.nbytes
    assert largest("reference") >= 4 * 2 * length**2


@pytest.mark.usefixtures("recorded", "traced")
def test_operations_of_training() -> None:
    """One launch forward and three backward, and four arrays that may have to be copied."""
    q, k, v, given = arguments(Sizes(64, 64))
    mx.eval(q, k, v, given)
    with use_backend("metal"):
        found = mx.vjp(lambda *a: attention(*a, "causal"), [q, k, v], [given])
    operations = graph.operations(found)
    # what `mx.vjp` returns is another look at the gradients
    assert operations.pop("Copy") == 3
    assert operations == {"Depends": 4, "Contiguous": 4}
