"""The order, size and content of the messages in which gradients are exchanged."""

import io
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.models import Decoder, find, known_model_types
from mlx_mmfree.training import data_parallel
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.data_parallel import (
    DataParallel,
    Exchanges,
    backward_order,
    buckets,
    fused,
    split_bucket,
)
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer import named_optimizer
from mlx_mmfree.training.optimizer_step import OptimizerStep
from mlx_mmfree.training.run_settings import LoopSettings
from tests.training.parallel_run import batch, build

BLOCKS = 4
# blocks of one kind, where an architecture may have several
ALIKE = {"hybrid": {"token_mixer": "mlgru"}, "metaformer": {"token_mixer": "mlgru"}}
LINEAR = {"layer_types": ["linear_attention"] * BLOCKS}
ALIKE |= dict.fromkeys(("qwen3_5", "qwen3_5_text", "prism_hadamard_qwen35"), LINEAR)
TOGETHER = {"reformer"}
"""Reversible blocks, whose gradients come all at once."""


def _nodes(arrays: list[mx.array]) -> int:
    """How many operations must still be run for these arrays."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count("shape=rectangle")


def _sizes(sizes: list[int]) -> list[list[int]]:
    return [[array.size for array in part] for part in buckets([mx.zeros(n) for n in sizes])]


def _decoders() -> list[str]:
    """The architectures that continue texts."""
    tiny = {name: find(name) for name in known_model_types()}
    return [
        name
        for name, architecture in tiny.items()
        if isinstance(architecture.build(architecture.config.from_hub(architecture.tiny)), Decoder)
    ]


@pytest.mark.sample(6)
@pytest.mark.parametrize("model_type", sorted(set(_decoders()) - TOGETHER))
def test_gradients_follow_in_the_order_of_the_backward_pass(model_type: str) -> None:
    architecture = find(model_type)
    values = {**architecture.tiny, "num_hidden_layers": BLOCKS, **ALIKE.get(model_type, {})}
    config = architecture.config.from_hub(values)
    model = architecture.build(config)
    mx.eval(model.parameters())
    rows = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
    loss, gradient = nn.value_and_grad(model, next_token_loss)(model, Batch.of_rows(rows))
    gradients: dict[str, mx.array] = dict(tree_flatten(gradient))
    order = backward_order(gradients)
    assert sorted(order) == sorted(gradients)
    ends = [
        _nodes([loss, *(gradients[other] for other in order[: order.index(last) + 1])])
        for block in reversed(range(BLOCKS))
        for last in [[name for name in order if name.startswith(f"blocks.{block}.")][-1]]
    ]
    # the last block's gradients wait for that block, and each further one's for one more
    added = np.diff(ends, prepend=_nodes([loss]))
    assert added[0] < 0.4 * sum(added)
    assert min(added[1:]) > 0.8 * max(added[1:])


def test_buckets_hold_25_mib() -> None:
    assert _sizes([2**20] * 60) == [[2**20] * 6] * 10
    assert _sizes([5_000_000, 4_000_000, 3_000_000, 9_000_000, 1]) == [
        [5_000_000],
        [4_000_000],
        [3_000_000],
        [9_000_000],
        [1],
    ]
    assert _sizes([]) == []


def test_a_large_model_has_few_buckets() -> None:
    assert _sizes([2**20] * 1024) == [[2**20] * 32] * 32


def test_split_bucket_is_the_inverse_of_fused() -> None:
    bucket = [
        mx.arange(6, dtype=mx.float32).reshape(2, 3),
        mx.array(7.0, mx.bfloat16),
        mx.array([8.0, 9.5], mx.float16),
    ]
    numbers = fused(bucket)
    assert numbers.dtype == mx.float32
    assert numbers.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9.5]
    for chunk, array in zip(split_bucket(numbers, bucket), bucket, strict=True):
        assert chunk.dtype == array.dtype and chunk.shape == array.shape
        assert mx.array_equal(chunk, array)


def test_exchanges_belong_to_the_graph_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[mx.array] = []
    # computes nothing, so that the graph stays
    monkeypatch.setattr(mx, "async_eval", sent.append)
    monkeypatch.setattr(Exchanges, "add", lambda *_: Future())
    monkeypatch.setattr(data_parallel, "_BYTES", 1)
    model = build("dense")
    mx.eval(model.parameters())
    processes = DataParallel()
    loss, gradient = nn.value_and_grad(model, next_token_loss)(model, batch(0, 0, 1))
    names = dict(tree_flatten(gradient))
    parts = list(buckets([names[name] for name in backward_order(names)]))
    processes._exchanged(parts)
    forward, first, all_ = _nodes([loss]), _nodes([loss, sent[0]]), _nodes([loss, *sent])
    assert len(sent) == len(parts) > BLOCKS
    # the first message waits for a part of the backward pass only
    assert 0 < first - forward < 0.2 * (all_ - forward)


def test_only_the_last_accumulated_pass_is_exchanged(tmp_path: Path) -> None:
    waiting = []

    class Recorded(DataParallel):
        def sums(self, loss: mx.array, counts: mx.array, gradient: Any) -> Any:
            waiting.append(_nodes([array for _, array in tree_flatten(gradient)]))
            return super().sums(loss, counts, gradient)

    model = build("dense")
    mx.eval(model.parameters())
    steps = [
        OptimizerStep(
            model,
            LoopSettings(tmp_path, 1),
            named_optimizer("sgd", 0.0, None),
            lambda step: mx.array(0.0),
            lambda step, parts=parts: [batch(part, 0, 1) for part in range(parts)],
            next_token_loss,
            Recorded(),
        )
        for parts in (1, 3)
    ]
    for step in steps:
        step(0)
    one, three = waiting
    # the plan of three passes adds what was summed before, and is otherwise as long as one pass's
    assert one < three < 1.2 * one
