"""The benchmark's structure and arithmetic; no test looks at how fast anything is."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.evaluation.benchmark import (
    QUICK,
    benchmark_model,
    benchmark_products,
    measure_machine,
)
from mlx_mmfree.evaluation.benchmark_bandwidth import measure_bandwidth
from mlx_mmfree.evaluation.benchmark_models import DecodeResult, ModelResult
from mlx_mmfree.evaluation.benchmark_products import ProductResult
from mlx_mmfree.evaluation.benchmark_weights import (
    PRESETS,
    random_model,
    random_packed,
    read_weights,
    token_bytes,
)
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.models import find
from mlx_mmfree.ops import pack_ternary, unpack_ternary
from mlx_mmfree.platform.memory_reader import MemoryReader, _shares, memory_reader
from mlx_mmfree.platform.threads import thread_count

HGRN = {
    "model_type": "hgrn_bit",
    "vocab_size": 70,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}
BITNET = PRESETS["bitnet-2b-4t"] | {
    "vocab_size": 70,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def reader() -> Iterator[MemoryReader]:
    with memory_reader() as made:
        yield made


@pytest.mark.parametrize("input_dims", [1, 15, 16, 33, 64, 100])
def test_random_packed_holds_trits_and_zero_padding(input_dims: int) -> None:
    words = random_packed(7, input_dims)
    trits = unpack_ternary(words, input_dims)
    assert set(np.unique(np.array(trits)).tolist()) <= {-1.0, 0.0, 1.0}
    assert mx.array_equal(pack_ternary(trits), words).item()


def test_random_packed_uses_all_three_trits() -> None:
    trits = np.array(unpack_ternary(random_packed(64, 256), 256))
    shares = [(trits == value).mean() for value in (-1, 0, 1)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


@pytest.mark.parametrize("config", [HGRN, BITNET], ids=["hgrn_bit", "bitnet"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_random_model_runs(config: dict, dtype: mx.Dtype) -> None:
    model = random_model(config, dtype)
    assert not any(isinstance(module, BitLinear) for module in model.modules())
    assert model.dtype == dtype
    logits, _ = model(mx.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, 70)
    assert mx.all(mx.isfinite(logits)).item()
    assert mx.std(logits).item() > 0


def test_random_model_takes_no_memory_for_float_masters() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = random_model(HGRN | sizes)
    ours = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    masters = 4 * (4 * 512 * 512 + 3 * 512 * 1536) * 4
    assert mx.get_peak_memory() - before < ours + masters / 4


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type"):
        random_model({"model_type": "nothing"})


def test_presets_have_the_published_numbers_of_ternary_weights() -> None:
    # ternary weights of the blocks, in millions
    published = {
        "mmfreelm-370m": 308.3,
        "mmfreelm-1.3b": 1233.1,
        "mmfreelm-2.7b": 2537.6,
        "bitnet-2b-4t": 2084.0,
    }
    assert set(PRESETS) == set(published)
    for name, config in PRESETS.items():
        architecture = find(config["model_type"])
        model = architecture.build(architecture.Config.from_hub(config))
        count = sum(
            module.input_dims * module.output_dims
            for block in model.blocks
            for module in block.modules()
            if isinstance(module, BitLinear)
        )
        assert count / 1e6 == pytest.approx(published[name], abs=0.1)


def test_a_token_reads_a_row_of_the_embedding_or_all_of_a_tied_one() -> None:
    untied, tied = random_model(HGRN), random_model(BITNET)
    for model, rows in ((untied, 1), (tied, 70)):
        everything = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        unread = (70 - rows) * model.embed.weight[0].nbytes
        assert token_bytes(model) == everything - unread
    assert sum(array.nbytes for array in read_weights(tied)) == token_bytes(tied)


@pytest.mark.parametrize("dtype", [mx.uint32, mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reader_takes_every_array(reader: MemoryReader, dtype: mx.Dtype, size: int) -> None:
    assert reader.seconds([mx.ones((size,), dtype), mx.ones((2, size), dtype)]) > 0


def test_reader_leaves_the_callers_processors_alone(reader: MemoryReader) -> None:
    affinity = getattr(os, "sched_getaffinity", lambda _: None)
    before = affinity(0)
    assert all(rate > 0 for rate in measure_bandwidth(reader, 2**16, 2))
    assert affinity(0) == before


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[10], [1, 5, 100, 3], [1, 1]])
def test_threads_share_every_word_once(sizes: list[int], count: int) -> None:
    words = np.arange(sum(sizes))
    shares = _shares(np.split(words, np.cumsum(sizes)[:-1]), count)
    assert len(shares) == count
    read = np.concatenate([part for share in shares for part in share])
    assert sorted(read.tolist()) == words.tolist()
    lengths = [sum(part.size for part in share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


def test_machine(reader: MemoryReader) -> None:
    shown = measure_machine(reader, QUICK).to_json()
    assert shown["threads"] == thread_count()
    assert shown["backend"] in ("metal", "native", "chunked", "reference")
    assert shown["read_gb_per_second"]["best"] >= shown["read_gb_per_second"]["median"] > 0


def test_products(reader: MemoryReader) -> None:
    settings = replace(QUICK, shapes=((64, 96), (96, 64)), walk_bytes=10_000, rounds=2)
    results = list(benchmark_products(reader, settings))
    assert [(r.output_dims, r.input_dims, r.rows) for r in results] == [
        (64, 96, 1),
        (64, 96, 8),
        (96, 64, 1),
        (96, 64, 8),
    ]
    for result in results:
        assert result.matrix_bytes == 64 * 96 // 4
        assert result.copies == math.ceil(10_000 / result.matrix_bytes)
        assert len(result.seconds) == len(result.read_seconds) == 2
        assert min(*result.seconds, *result.read_seconds) > 0


def test_product_figures() -> None:
    result = ProductResult(
        64, 32, 8, 3, 512, seconds=(4e-6, 2e-6, 8e-6), read_seconds=(1e-6, 1e-6, 4e-6)
    )
    assert result.bytes_per_second == pytest.approx(512 / 4e-6)
    assert result.macs_per_second == pytest.approx(64 * 32 * 8 / 4e-6)
    # the ratio of each round, then the median: 1/4, 1/2, 1/2
    assert result.bandwidth_share == pytest.approx(0.5)
    assert result.to_json()["walked_bytes"] == 3 * 512


@pytest.mark.parametrize("config", [HGRN, BITNET], ids=["hgrn_bit", "bitnet"])
def test_model(reader: MemoryReader, config: dict) -> None:
    model = random_model(config)
    settings = replace(QUICK, positions=(9, 2, 9))
    result = benchmark_model(reader, model, "tiny", settings)
    assert result.token_bytes == token_bytes(model)
    assert result.peak_bytes >= result.token_bytes
    assert [decode.position for decode in result.decode] == [2, 9]
    assert all(decode.tokens_per_second > 0 for decode in result.decode)
    assert all(decode.state_bytes > 0 for decode in result.decode)


def test_model_figures() -> None:
    decode = DecodeResult(5, (0.1, 0.2, 0.4), (0.1, 0.1, 0.1), state_bytes=8)
    result = ModelResult("m", 100, 200, 128, (0.5, 1.0, 4.0), (decode,))
    shown = result.to_json()
    assert shown["prefill_tokens_per_second"] == pytest.approx(128)
    assert shown["decode"][0]["tokens_per_second"] == pytest.approx(5)
    assert shown["decode"][0]["bandwidth_share"] == pytest.approx(0.5)
