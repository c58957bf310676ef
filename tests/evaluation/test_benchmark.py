"""The benchmark's structure and arithmetic; no test looks at how fast anything is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, MeasurementError, UnsupportedModelError
from mlx_mmfree.evaluation import benchmark, benchmark_process
from mlx_mmfree.evaluation.benchmark import QUICK, ModelChoice, Report
from mlx_mmfree.evaluation.benchmark_limits import held_arrays
from mlx_mmfree.evaluation.benchmark_llama_file import write_model
from mlx_mmfree.evaluation.benchmark_models import _bytes_in_use
from mlx_mmfree.evaluation.benchmark_plot import plot_roofline
from mlx_mmfree.evaluation.benchmark_process import read_result, run_task
from mlx_mmfree.evaluation.benchmark_record import MULTIPLY, READ, Record, figures
from mlx_mmfree.evaluation.benchmark_weights import (
    has_dense_head,
    head_macs,
    presets,
    random_head,
    random_model,
    random_packed,
    read_weights,
    ternary_macs,
)
from mlx_mmfree.generation.decode import prefill
from mlx_mmfree.layers import BitLinear, pack_linears
from mlx_mmfree.models import find
from mlx_mmfree.ops import pack_ternary, unpack_ternary
from mlx_mmfree.platform.memory_reader import MemoryReader, _shares, memory_reader

HGRN = {
    "model_type": "hgrn_bit",
    "vocab_size": 70,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}
BITNET = dict(presets()["bitnet-2b-4t"]) | {
    "vocab_size": 70,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FALCON = dict(presets()["falcon3-1b"]) | {
    "vocab_size": 70,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def reader() -> Iterator[MemoryReader]:
    with memory_reader() as made:
        yield made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Runs every measurement in this process; lists the tasks and their threads."""
    measured = []

    def measure(task: str, arguments: dict[str, Any], threads: int) -> tuple[list[Record], dict]:
        measured.append((task, threads))
        found = run_task(task, json.loads(json.dumps(arguments)))
        return read_result(json.dumps(found))

    monkeypatch.setattr(benchmark, "measure", measure)
    return measured


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
    for block in model.blocks:
        if "rope" in block.token_mixer:
            assert block.token_mixer.rope.wavelengths.dtype == mx.float32


def test_a_token_reads_the_slots_in_use() -> None:
    model = random_model(BITNET)
    state = prefill(model, mx.zeros((1, 3), mx.int32))
    [keys, values, _], *_ = state
    assert keys.shape[2] == 256
    in_use = (keys.nbytes + values.nbytes) * 3 // 256
    assert in_use <= _bytes_in_use(state[0]) <= in_use + 12


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
        "falcon3-1b": 1132.5,
    }
    assert set(presets()) == set(published)
    for name, config in presets().items():
        architecture = find(config["model_type"])
        model = architecture.build(architecture.config.from_hub(config))
        pack_linears(model)
        assert ternary_macs(model) / 1e6 == pytest.approx(published[name], abs=0.1)
        assert head_macs(model) == config["vocab_size"] * config["hidden_size"]
        assert has_dense_head(config) == (not name.startswith("mmfreelm"))


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
@pytest.mark.parametrize("config", [BITNET, FALCON], ids=["tied", "untied"])
def test_head_of_some_bits(config: dict, bits: int) -> None:
    model = random_model(config, head_bits=bits)
    head = model.head if "head" in model else model.embed
    size = head.weight.nbytes * 8 / (70 * 64)
    assert size == bits
    logits, _ = model(mx.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, 70)
    assert mx.all(mx.isfinite(logits)).item() and mx.std(logits).item() > 0


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_no_drawn_number_is_denormal(bits: int, dtype: mx.Dtype) -> None:
    head = random_head(70, 4096, bits, dtype)
    for name, array in head.items():
        if not isinstance(array, mx.array) or not mx.issubdtype(array.dtype, mx.floating):
            continue
        numbers = np.abs(np.array(array.astype(mx.float32)))
        assert numbers.min() >= (2**-14 if array.dtype == mx.float16 else 2**-126), name
    if bits == 16:
        # of the size of ordinary weights, on both sides of zero
        weights = np.array(head.weight.astype(mx.float32))
        assert np.abs(weights).min() >= 2**-7 and np.abs(weights).max() < 2**-3
        assert abs(weights.mean()) < weights.std() / 100
        assert len(np.unique(np.abs(weights))) == 4 * 2**7


def test_a_token_reads_all_of_a_tied_embedding_and_none_of_an_untied_one() -> None:
    untied, tied = random_model(HGRN), random_model(BITNET)
    for model, unread in ((untied, untied.embed.weight.nbytes), (tied, 0)):
        everything = sum(array.nbytes for array in held_arrays(model))
        assert sum(array.nbytes for array in read_weights(model)) == everything - unread


def test_arrays_that_are_no_parameters_are_held() -> None:
    model = random_model(HGRN)
    before = held_arrays(model)
    model.blocks[0].token_norm._arranged = (mx.ones((3,)), mx.zeros((2,)))
    assert [array.size for array in held_arrays(model) if all(array is not b for b in before)] == [
        3,
        2,
    ]


@pytest.mark.parametrize("dtype", [mx.uint32, mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reader_takes_every_array(reader: MemoryReader, dtype: mx.Dtype, size: int) -> None:
    assert reader.seconds([mx.ones((size,), dtype), mx.ones((2, size), dtype)]) > 0


def test_reader_leaves_the_callers_processors_alone(reader: MemoryReader) -> None:
    affinity = getattr(os, "sched_getaffinity", lambda _: None)
    before = affinity(0)
    assert reader.seconds([mx.ones((2**14,))], 2) > 0
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


def record(name: str, limit: str, own: tuple, plain: tuple, threads: int = 1) -> Record:
    return Record(name, threads, limit, 100, 1000, own, plain, "tokens", 8)


def test_random_weights_are_of_the_type_that_the_configuration_names() -> None:
    assert random_model(HGRN).dtype == mx.float32
    assert random_model(HGRN | {"torch_dtype": "bfloat16"}).dtype == mx.bfloat16
    with pytest.raises(CheckpointError, match=r"'dtype' must be one of float32, .* got 'int8'"):
        random_model(HGRN | {"torch_dtype": "int8"})


def test_a_record_is_compared_round_by_round() -> None:
    measured = record("a", READ, (4.0, 2.0, 8.0), (1.0, 1.0, 4.0))
    # the ratio of each round, then the median: 1/4, 1/2, 1/2
    assert measured.share == 0.5
    assert measured.limit_rate == 100
    assert record("a", MULTIPLY, (1.0,), (2.0,)).limit_rate == 500


def test_processes_with_slow_memory_are_shown_but_do_not_count() -> None:
    rates = {1.0: 0.5, 1.2: 0.7, 1.3: 0.1}
    records = [record("a", READ, (plain / share,), (plain,)) for plain, share in rates.items()]
    [figure] = figures(records)
    assert [r.limit_rate for r in figure.counted] == [100, pytest.approx(100 / 1.2)]
    assert figure.share == pytest.approx(0.6)
    shown = figure.to_json()
    assert [process["is_counted"] for process in shown["processes"]] == [True, True, False]
    assert shown["seconds"] == pytest.approx((2.0 + 1.2 / 0.7) / 2)
    assert shown["rate"] == pytest.approx(8 / shown["seconds"])


def test_figures_are_apart_by_name_threads_and_limit() -> None:
    kinds = [("a", READ, 1), ("a", READ, 2), ("a", MULTIPLY, 1), ("b", READ, 1)]
    records = [record(name, limit, (1.0,), (1.0,), threads) for name, limit, threads in kinds]
    assert [len(figure.records) for figure in figures(records + records)] == [2] * 4


def test_everything(here: list) -> None:
    settings = replace(QUICK, shapes=((64, 96),), heads=((70, 64),), processes=2, walk_bytes=10_000)
    choices = [ModelChoice(name, config) for name, config in (("hgrn", HGRN), ("bitnet", BITNET))]
    shown: list[Report] = []
    reports = benchmark.benchmark(settings, [1, 2], models=choices)
    whole = benchmark.join(reports, shown.append)
    in_turn = [("products", 1), ("products", 2)]
    assert here == in_turn * 2 + [("training", 2)] * 2 + [("model", 2)] * 4
    assert len(shown) == 5
    named = {figure.records[0].name: figure for figure in whole.figures}
    assert set(named) == {
        *(f"ternary 64 x 96, {rows}" for rows in ("1 row", "8 rows")),
        *(f"head 70 x 64, {bits} bits, 1 row" for bits in (4, 6, 8, 16)),
        "MatMul-free, 1 block of 64: training step",
        *(
            f"{model}: {what}"
            for model in ("hgrn", "bitnet")
            for what in ("prefill of 8", "decode after 2", "decode after 8")
        ),
    }
    for figure in whole.figures:
        assert len(figure.records) == (4 if "row" in figure.records[0].name else 2)
        assert figure.share > 0
    assert named["ternary 64 x 96, 1 row"].records[0].macs == 64 * 96
    assert named["bitnet: prefill of 8"].records[0].macs > 8 * 2 * 64 * 64
    assert [note["model"] for note in whole.memory] == ["hgrn"] * 2 + ["bitnet"] * 2
    assert set(whole.machine["limits"]) == {"1", "2"}
    # on a CPU nothing else multiplies ternary matrices
    assert whole.ratios == []
    json.dumps(whole.to_json())


@pytest.mark.plot
def test_roofline_is_a_picture(tmp_path: Path) -> None:
    measured = [record("a", READ, (4.0,), (1.0,)), record("b", MULTIPLY, (1.0,), (2.0,))]
    limits = {"1": {"bytes_per_second": 30e9, "macs_per_second": 400e9}}
    machine = {"device": "a processor", "limits": limits}
    plot_roofline(Report(machine, figures(measured)), tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "roof.png"]


def test_a_fresh_process_measures() -> None:
    arguments = {
        "shapes": [[64, 96]],
        "rows": [1],
        "heads": [],
        "head_bits": [],
        "walk_bytes": 2**12,
        "rounds": 2,
    }
    [found, *_], notes = benchmark_process.measure("products", arguments, 3)
    assert (found.threads, len(found.seconds), len(found.limit_seconds)) == (3, 2, 2)
    assert notes["bytes_per_second"] > 0
    with pytest.raises(MeasurementError) as failure:
        benchmark_process.measure("products", {**arguments, "rounds": "x"}, 1)
    assert str(failure.value).startswith("[bench] the measurement of products failed: TypeError in")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"length": "x"},
            r"\[bench\] the measurement of training failed: TypeError in \S+, line \d+: ",
        ),
        ({"config": {"model_type": "no"}}, r"\[\w+\] .*'no'"),
    ],
)
def test_a_task_that_fails_says_why_in_one_line(arguments: dict[str, Any], line: str) -> None:
    given = {"name": "a", "config": HGRN, "batch_size": 1, "length": 2, "rounds": 1} | arguments
    found = json.dumps(benchmark_process.result_or_failure("training", given))
    with pytest.raises(MeasurementError, match=f"^{line}"):
        read_result(found)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import sys; sys.exit('first\\nthe reason')", "status 1. the reason"),
        ("import sys; sys.exit(3)", "status 3. It did not say why."),
        (
            "import os; os.kill(os.getpid(), 9)",
            "SIGKILL, which the system sends when memory is short",
        ),
        ("import os; os.kill(os.getpid(), 15)", "the signal SIGTERM. It did not"),
    ],
)
def test_how_a_process_ended(code: str, line: str) -> None:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    with pytest.raises(MeasurementError, match=r"^\[bench\] a test ended with ") as failure:
        benchmark_process.check_ending("a test", process.returncode, process.stderr)
    assert line in str(failure.value)


def test_llama_cpp_file_has_the_shape(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "small.gguf"
    written = write_model(file, is_small=True)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert len(tensors) == 2 + 2 * 11
    assert tensors["blk.1.ffn_down.weight"].shape.tolist() == [512, 256]
    assert tensors["blk.1.ffn_down.weight"].tensor_type == gguf.GGMLQuantizationType.TQ2_0
    linears = [t for name, t in tensors.items() if "norm" not in name]
    assert sum(t.n_elements for t in linears) == written.macs
    # codes 0 to 2 only, and a scale that is a number
    blocks = tensors["blk.0.attn_q.weight"].data.reshape(-1, 66)
    assert all(((blocks[:, :64] >> shift) & 3).max() == 2 for shift in (0, 2, 4, 6))
    assert np.isfinite(np.ascontiguousarray(blocks[:, 64:]).view(np.float16)).all()
