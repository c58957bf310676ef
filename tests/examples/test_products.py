"""Models of random weights, and the benchmark of products; no test looks at how fast anything is."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import products
import pytest
from beside_llama_cpp import FILE, compare, write_codes, write_model
from mlx.utils import tree_flatten
from products import ON_GPU, QUICK, BenchmarkSettings, Report, benchmark, join, main
from random_models import has_dense_head, random_head, random_model, random_packed
from roofline import plot_roofline

from mlx_mmfree.errors import CheckpointError, MeasurementError, UnsupportedModelError
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.evaluation.benchmark import (
    MULTIPLY,
    READ,
    Record,
    bytes_in_use,
    head_macs,
    metrics,
    nested_arrays,
    read_weights,
    ternary_macs,
)
from mlx_mmfree.generation.reader import prefill
from mlx_mmfree.hub import load_model
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.ops import pack_ternary, unpack_ternary

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
PRODUCTS, TRAINING, MODEL = products.PRODUCTS, products.TRAINING, products.MODEL


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HGRN))
    return file


@pytest.fixture(autouse=True)
def measured(here: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Runs every measurement in this process; lists the functions and their threads."""
    asked = []

    def measure(function: str, arguments: dict[str, Any], threads: int) -> Any:
        asked.append((function, threads))
        return here(function, arguments)

    monkeypatch.setattr(products, "measure", measure)
    return asked


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
    assert in_use <= bytes_in_use(state[0]) <= in_use + 12


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


@pytest.mark.exhaustive
def test_presets_have_the_published_numbers_of_ternary_weights() -> None:
    # ternary weights of the blocks, in millions
    published = {
        "mmfreelm-370m": 308.3,
        "mmfreelm-1.3b": 1233.1,
        "mmfreelm-2.7b": 2537.6,
        "bitnet-2b-4t": 2084.0,
        "bitnet-b1.58-large": 679.5,
        "bitnet-b1.58-3b": 3221.5,
        "falcon3-1b": 1132.5,
        "falcon3-3b": 2422.2,
        "falcon3-7b": 6650.1,
        "falcon3-10b": 9500.1,
        "falcon-e-1b": 1585.4,
        "falcon-e-3b": 2919.2,
        "llama3-8b-1.58": 6979.3,
        "ternary-bonsai-1.7b": 1409.3,
        "ternary-bonsai-4b": 3633.3,
        "ternary-bonsai-8b": 6945.8,
        "ternary-bonsai-27b": 24350.6,
    }
    assert set(presets()) == set(published)
    for name, config in presets().items():
        model = skeleton(config)
        assert ternary_macs(model) / 1e6 == pytest.approx(published[name], abs=0.1)
        assert head_macs(model) == model.vocab_size * config["hidden_size"]
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
        everything = sum(array.nbytes for array in nested_arrays(model))
        assert sum(array.nbytes for array in read_weights(model)) == everything - unread


def test_arrays_that_are_no_parameters_are_held() -> None:
    model = random_model(HGRN)
    before = nested_arrays(model)
    model.blocks[0].token_norm._arranged = (mx.ones((3,)), mx.zeros((2,)))
    assert [
        array.size for array in nested_arrays(model) if all(array is not b for b in before)
    ] == [
        3,
        2,
    ]


def test_random_weights_are_of_the_type_that_the_configuration_names() -> None:
    assert random_model(HGRN).dtype == mx.float32
    assert random_model(HGRN | {"torch_dtype": "bfloat16"}).dtype == mx.bfloat16
    with pytest.raises(CheckpointError, match=r"'dtype' must be one of float32, .* got 'int8'"):
        random_model(HGRN | {"torch_dtype": "int8"})


def test_everything(measured: list) -> None:
    settings = replace(QUICK, shapes=((64, 96),), heads=((70, 64),), processes=2, walk_bytes=10_000)
    choices = [
        {"name": name, "config": config} for name, config in (("hgrn", HGRN), ("bitnet", BITNET))
    ]
    shown: list[Report] = []
    reports = benchmark(settings, [1, 2], models=choices)
    whole = join(reports, shown.append)
    in_turn = [(PRODUCTS, 1), (PRODUCTS, 2)]
    assert measured == in_turn * 2 + [(TRAINING, 2)] * 2 + [(MODEL, 2)] * 4
    assert len(shown) == 5
    named = {figure.records[0].name: figure for figure in whole.metrics}
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
    for figure in whole.metrics:
        assert len(figure.records) == (4 if "row" in figure.records[0].name else 2)
        assert figure.share > 0
    assert named["ternary 64 x 96, 1 row"].records[0].macs == 64 * 96
    assert named["bitnet: prefill of 8"].records[0].macs > 8 * 2 * 64 * 64
    assert [note["model"] for note in whole.memory] == ["hgrn"] * 2 + ["bitnet"] * 2
    assert set(whole.machine["limits"]) == {"1", "2"}
    # other products are measured on a GPU alone
    assert whole.ratios == []
    json.dumps(whole.to_json())


def record(name: str, limit: str, own: tuple, plain: tuple, threads: int = 1) -> Record:
    return Record(name, threads, limit, 100, 1000, own, plain, "tokens", 8)


@pytest.mark.plot
def test_roofline_is_a_picture(tmp_path: Path) -> None:
    measured = [record("a", READ, (4.0,), (1.0,)), record("b", MULTIPLY, (1.0,), (2.0,))]
    limits = {"1": {"bytes_per_second": 30e9, "macs_per_second": 400e9}}
    machine = {"device": "a processor", "limits": limits}
    plot_roofline(machine, metrics(measured), tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "roof.png"]


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


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", ["ternary-bonsai-1.7b", "ternary-bonsai-27b"])
@pytest.mark.parametrize("kind", ["Q1_0", "Q2_0"])
def test_bonsai_file_can_be_read_here(tmp_path: Path, kind: str, config: str) -> None:
    file = tmp_path / "small.gguf"
    written = write_codes(file, kind, config, is_small=True)
    model = load_model(file)
    assert np.isfinite(model(mx.array([[1, 2, 3]]))[0]).all()
    codes = [each for each in matrices(model).values() if each.holds_codes]
    assert sum(each.input_dims * each.output_dims for each in codes) == written.macs


@pytest.mark.parametrize("kind", ["TQ2_0", "Q1_0"])
def test_llama_cpp_is_measured_in_turn(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pytest.importorskip("gguf")
    asked = []

    def measure(function: str, arguments: dict[str, Any], threads: int) -> Any:
        asked.append(function)
        name = arguments["name"]
        seconds = (2.0,) if name.startswith("ours") else (6.0,)
        of = record(f"{name}: prefill of 8", READ, seconds, (1.0,))
        return {"records": [vars(of)]}

    monkeypatch.setattr(products, "measure", measure)
    report = compare(replace(QUICK, processes=2), 1, kind)
    own = MODEL if kind == "TQ2_0" else FILE
    assert asked == [own, "beside_llama_cpp:measure_llama_cpp"] * 2
    [ratio] = report.ratios
    assert (ratio.name, ratio.other) == ("prefill of 8", f"llama.cpp with {kind}")
    assert ratio.median == ratio.best == 3.0


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["--quick", "--json", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result: dict[str, Any] = json.loads(shown.out)
    return result


def test_json(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    flags = ["--config", str(config), "--no-training", "--threads", "1"]
    shown = report(capsys, *flags)
    assert set(shown) == {"machine", "metrics", "memory", "ratios", "is_complete"}
    assert shown["is_complete"]
    assert set(shown["machine"]["limits"]) == {"1"}
    names = [figure["name"] for figure in shown["metrics"]]
    assert "ternary 256 x 512, 1 row" in names
    assert [name for name in names if name.endswith(": decode after 2")] == [
        f"{config}: decode after 2",
    ]
    assert all(figure["fraction_of_limit"] > 0 for figure in shown["metrics"])


def test_flags_win_over_quick(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    flags = ["--positions", "3", "1", "--prompt-tokens", "5", "--rounds", "2", "--processes", "2"]
    shown = report(capsys, "--config", str(config), *flags, "--no-products", "--no-training")
    names = [figure["name"].split(": ")[-1] for figure in shown["metrics"]]
    assert names == ["prefill of 5", "decode after 1", "decode after 3"]
    for figure in shown["metrics"]:
        assert [len(process["seconds"]) for process in figure["processes"]] == [2, 2]


def test_shapes_and_their_memory(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shapes", "40x33", "8x325", "--rows", "2", "--walk-mb", "1", "--threads", "1"]
    shown = report(capsys, *flags, "--no-training")
    names = {figure["name"] for figure in shown["metrics"]}
    assert {"ternary 40 x 33, 2 rows", "ternary 8 x 325, 2 rows"} <= names
    assert not any(name.startswith("head") for name in names)


def test_table(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert main(["--quick", "--config", str(config), "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    for text in ("of limit", "plain read", "256 x 512", "training step", "decode after 2", "MB of"):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--config", "no-such-preset"], "--config must be one of bitnet-2b-4t, bitnet-b1.58-3b, "),
        (["--rounds", "0"], "must be a whole number from 1"),
        (["--shapes", "64"], "argument --shapes: "),
        (["--head-bits", "5"], "invalid choice: 5"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["--quick", "--no-products", "--no-training", "--json", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert reason in shown.err and shown.err.count("\n") == 1


def test_threads_are_those_of_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "on_cpu", lambda: False)
    assert main(["--quick", "--threads", "2"]) == 2
    assert "error: --threads must be left out where a GPU computes" in capsys.readouterr().err


def test_flags_win_over_what_is_usual_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(settings: BenchmarkSettings, threads: list[int], **_: object) -> Iterator[Report]:
        asked.append((settings, threads))
        yield Report()

    monkeypatch.setattr(products, "on_cpu", lambda: False)
    monkeypatch.setattr(products, "benchmark", measured)
    assert main([]) == 0
    assert main(["--processes", "5"]) == 0
    assert asked == [(ON_GPU, [0]), (replace(ON_GPU, processes=5), [0])]


def test_ctrl_c_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Report]:
        yield Report(machine={"device": "a processor"})
        raise KeyboardInterrupt

    monkeypatch.setattr(products, "benchmark", interrupted)
    assert main(["--quick", "--json"]) == 130
    shown = json.loads(capsys.readouterr().out)
    assert shown["machine"] == {"device": "a processor"} and shown["is_complete"] is False


def test_a_failed_process_is_one_line_and_what_was_measured_is_kept(
    here: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(function: str, arguments: dict[str, Any], threads: int) -> Any:
        if function != PRODUCTS:
            raise MeasurementError("[bench] no memory.")
        return here(function, arguments)

    monkeypatch.setattr(products, "measure", measure)
    assert main(["--quick", "--json", "--threads", "1"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: [bench] no memory.\n"
    found = json.loads(shown.out)
    assert found["is_complete"] is False
    assert "ternary 256 x 512, 1 row" in [figure["name"] for figure in found["metrics"]]
