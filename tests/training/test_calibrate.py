"""Dense models that become ternary window by window: the run, the command, what opens the result."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree import generate, load, native
from mlx_mmfree.cli import main
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.ternary.groups import TernaryScheme
from mlx_mmfree.models import find
from mlx_mmfree.platform.device import device_info
from mlx_mmfree.training.calibrate.calibration import Calibration
from mlx_mmfree.training.calibrate.modulation import ModulatedLinear, Modulation
from mlx_mmfree.training.calibrate.settings import CalibrateSettings
from mlx_mmfree.training.calibrate.window import sharpness_at
from tests.hub.checkpoints import GOLDENS
from tests.process_group import ROOT
from tests.tolerances import TOLERANCE, relative_error
from tests.training.test_ternarize import TEXT, dense_model

_SIZES = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    save_model(tmp_path / "dense", dense_model(**_SIZES), GOLDENS / "tokenizer_bpe")
    (tmp_path / "train.txt").write_text(TEXT * 60)
    return tmp_path / "dense"


def flags_of(dense: Path, *more: str) -> list[str]:
    folder = dense.parent
    flags = ["calibrate", "--model", str(dense), "--output", str(folder / "run")]
    flags += ["--data", str(folder / "train.txt"), "--samples", "8", "--valid-samples", "2"]
    flags += ["--length", "16", "--batch-size", "4", "--epochs", "2", "--group-size", "64"]
    return [*flags, *more]


def modulated(rank: int | None = None, start: str = "kept") -> tuple[ModulatedLinear, nn.Linear]:
    mx.random.seed(3)
    linear = nn.Linear(256, 48)
    linear.weight = mx.random.normal(linear.weight.shape) * 0.03 + 0.01
    made = ModulatedLinear(linear, Modulation(64, rank, start), mx.random.key(1))  # type: ignore[arg-type]
    if rank:
        made.up = mx.random.normal(made.up.shape) * 0.1
    made.freeze()
    made.unfreeze(keys=made.learned, recurse=False)
    return made, linear


def published(linear: ModulatedLinear, sharpness: float | None) -> np.ndarray:
    """The matrix by the published equations, in float64, group by group."""
    array = {name: np.array(linear[name], np.float64) for name in ("shift", "scale", "threshold")}
    unit, units = float(linear.unit.item()), np.array(linear.weight, np.float64)
    if "up" in linear:
        units = units + np.array(linear.up, np.float64) @ np.array(linear.down, np.float64)
    result = np.empty_like(units)
    for row in range(units.shape[0]):
        for group in range(units.shape[1] // 64):
            part = slice(64 * group, 64 * (group + 1))
            w = unit * units[row, part]
            pm, pa, pd = (1 / (1 + np.exp(-array[name][row, group])) for name in array)
            m0 = w.mean()
            a0 = np.abs(w - m0).mean() + unit * 1e-6
            m, a, d = m0 + (2 * pm - 1) * a0, 2 * pa * a0, 0.5 * 2 * pd
            v = (w - m) / a
            if sharpness is None:
                t = np.clip(np.round(0.5 * (w - m) / (a * d)), -1, 1)
                a = np.float64(np.float16(a))
            else:
                s = sharpness
                t = (np.tanh(s * (v - d)) + np.tanh(s * (v + d))) / (2 * np.tanh(s))
            result[row, part] = a * t
    return result


@pytest.mark.parametrize("rank", [None, 0, 4])
@pytest.mark.parametrize("sharpness", [None, 1.0, 30.0])
def test_the_matrix_is_that_of_the_published_equations(
    rank: int | None, sharpness: float | None
) -> None:
    linear, _ = modulated(rank)
    names = ("shift", "scale", "threshold")
    for name in names:
        linear[name] = linear[name] + 0.3 * mx.random.normal(linear[name].shape)
    linear.sharpen(None if sharpness is None else mx.array(sharpness))
    # the hard format has scales of 16 bits
    tolerance = TOLERANCE[mx.float32 if sharpness else mx.float16]
    wanted = mx.array(published(linear, sharpness).astype(np.float32))
    assert relative_error(linear.current(), wanted) <= tolerance


@pytest.mark.parametrize("rank", [None, 0, 4])
@pytest.mark.parametrize("sharpness", [None, 3.0])
@pytest.mark.parametrize("chunk", [2**21, 11 * 256])
def test_gradients_are_those_of_the_plain_product(
    rank: int | None, sharpness: float | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_mmfree.training.calibrate.modulation._CHUNK", chunk)
    linear, _ = modulated(rank)
    linear.sharpen(None if sharpness is None else mx.array(sharpness))
    x, wanted = mx.random.normal((2, 3, 256)), mx.random.normal((2, 3, 48))

    def plain(module: ModulatedLinear, x: mx.array) -> mx.array:
        return ((x @ module.current().T + module.bias) * wanted).sum()

    def own(module: ModulatedLinear, x: mx.array) -> mx.array:
        return (module(x) * wanted).sum()

    gradients = [
        dict(tree_flatten(nn.value_and_grad(linear, f)(linear, x)[1])) for f in (own, plain)
    ]
    assert gradients[0].keys() == gradients[1].keys() == set(linear.learned)
    for name, gradient in gradients[0].items():
        assert relative_error(gradient, gradients[1][name]) <= TOLERANCE[mx.float32], name
    of_x = [mx.grad(lambda x, f=f: f(linear, x))(x) for f in (own, plain)]
    assert relative_error(of_x[0], of_x[1]) <= TOLERANCE[mx.float32]


def test_it_begins_as_the_best_rounding() -> None:
    linear, first = modulated()
    scheme = TernaryScheme(threshold=0.7, keeps_mean=False, group_size=64)
    trits, scales = scheme.applied(first.weight)
    packed = linear.to_packed()
    assert relative_error(packed.scales, scales) <= TOLERANCE[mx.float16]
    wanted = np.repeat(np.array(scales, np.float32), 64, axis=1) * np.array(trits)
    assert relative_error(linear.current(), mx.array(wanted)) <= TOLERANCE[mx.float16]
    # the published start has a threshold of a half of the mean distance from the mean
    other, _ = modulated(start="mean")
    assert not any(mx.any(other[name]).item() for name in ("shift", "scale", "threshold"))


def test_the_packed_format_computes_the_same() -> None:
    linear, _ = modulated(4)
    x = mx.random.normal((5, 256))
    packed = linear.to_packed()
    assert (packed.bits, packed.group_size) == (2, 64)
    assert relative_error(packed(x), linear(x)) <= TOLERANCE[mx.float32]


def test_trits_sharpen_until_they_are_hard() -> None:
    values = [sharpness_at(share) for share in (0, 0.2, 0.4, 0.8)]
    assert values == sorted(values) and (values[0], values[-1]) == (1.0, 30.0)


def test_windows_cover_each_layer() -> None:
    given = {"model": "m", "output": "o", "data": ("d",)}
    for window, stride, last in ((1, None, 0), (2, None, 1), (4, 2, 0), (4, 3, 2), (9, None, 0)):
        settings = CalibrateSettings(**given, window=window, stride=stride, dense_last=last)
        for layers in range(last + 1, 14):
            windows = settings.windows(layers)
            assert {n for each in windows for n in each} == set(range(layers - last))
            assert all(0 < len(each) <= window for each in windows)
            assert all(b.start > a.start for a, b in pairwise(windows))


def test_the_command(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags_of(dense, "--epochs", "20")) == 0
    out = capsys.readouterr().out
    assert "Window 2 of 2, layer 1: held-out error" in out and "nats a token before" in out
    run = dense.parent / "run"
    written = {each.name for each in run.iterdir()}
    assert written - {"errors.png"} == {"calibrate.json", "log.jsonl", "model", "tokens"}
    # which is drawn where matplotlib is installed
    assert ("errors.png" in written) == (find_spec("matplotlib") is not None)
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["quantization"]["bits"] == 2
    report = json.loads((run / "calibrate.json").read_text())
    assert all(each["after"] < each["before"] for each in report["windows"])
    model, teacher = load_model(run / "model"), load_model(dense)
    linears = [matrix for block in model.blocks for matrix in matrices(block).values()]
    assert len(linears) == 14 and all(matrix.is_packed for matrix in linears)
    # what is not a linear of a block is the dense model's
    assert mx.array_equal(model.embed.weight, teacher.embed.weight)
    assert "mmfree calibrate" in (run / "model" / "README.md").read_text()
    # the losses that the run prints are both models'
    calibration = Calibration(CalibrateSettings(**_settings(dense)))
    from mlx_mmfree.training.calibrate.calibration import _rows
    from mlx_mmfree.training.tasks.corpus import CausalLMTask

    task = CausalLMTask(calibration.settings.corpus(), teacher, dense, (0, 1))
    rows = _rows(calibration.settings, task)[8:]
    for name, each in (("dense_loss", teacher), ("ternary_loss", model)):
        logits = each(mx.array(rows[:, :-1]))[0].astype(mx.float32)
        wanted = nn.losses.cross_entropy(logits, mx.array(rows[:, 1:]), reduction="mean").item()
        assert abs(report["metrics"][name] - wanted) < 2e-3 * wanted


def _settings(dense: Path) -> dict[str, object]:
    return {
        "model": str(dense),
        "output": str(dense.parent / "run"),
        "data": (str(dense.parent / "train.txt"),),
        "samples": 8,
        "valid_samples": 2,
        "sequence_length": 16,
        "batch_size": 4,
        "group_size": 64,
    }


_BASE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_SHAPES = {
    "llama": {"head_dim": 32},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 64},
}


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)])
def test_families(name: str, dense: Path) -> None:
    record = find(name)
    mx.random.seed(1)
    sizes = {**record.tiny, **_BASE, **_SHAPES[name], "vocab_size": 520}
    save_model(
        dense,
        record.build(record.config.from_hub(sizes)),
        GOLDENS / "tokenizer_bpe",
        overwrite=True,
    )
    assert main(flags_of(dense, "--window", "2")) == 0
    model = load_model(dense.parent / "run" / "model")
    assert any(matrix.is_packed for matrix in matrices(model.blocks[1]).values())


def _killed(arguments: list[str], folder: Path, after: str) -> None:
    """Runs the command and kills it once a file of the run is there."""
    code = "import sys; from mlx_mmfree.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 120
    while not list(folder.glob(after)) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "after",
    [
        "run/windows/window-000.safetensors",
        pytest.param("run/windows/ternary-001.bin", marks=pytest.mark.exhaustive),
        pytest.param("run/windows/carried-001.safetensors", marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(dense: Path, after: str) -> None:
    flags = flags_of(dense, "--window", "2", "--stride", "1", "--epochs", "6")
    save_model(
        dense, dense_model(**_SIZES, num_hidden_layers=4), GOLDENS / "tokenizer_bpe", overwrite=True
    )
    (dense.parent / "apart").mkdir()
    other = [*flags, "--output", str(dense.parent / "apart" / "run")]
    assert main(other) == 0
    _killed(flags, dense.parent, after)
    assert main(flags) == 0
    files = (dense.parent / name / "run" for name in ("", "apart"))
    first, second = ((run / "model" / "model.safetensors").read_bytes() for run in files)
    assert first == second
    assert not (dense.parent / "run" / "windows").exists()


def test_a_run_goes_on_with_its_own_settings_alone(
    dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _killed(flags_of(dense, "--epochs", "200"), dense.parent, "run/windows/window-000.safetensors")
    assert main(flags_of(dense, "--epochs", "3")) == 2
    assert "holds a run with other values of epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--group-size", "128", "--model", "narrow"], "--group-size must divide the 64 inputs"),
        (["--dense-last", "2"], "--dense-last must be less than the 2 layers"),
        (["--window", "2", "--stride", "3"], "--stride must be from 1 to --window (2) but got 3"),
        (["--samples", "2"], "--batch-size must be at most"),
        (["--embed-bits", "5"], "--embed-bits must be 4, 6 or 8 but got 5"),
        (["--samples", "4000"], "--data must hold more than"),
        (["--data", "none.txt"], "--data must name files"),
        (["--model", "ternary"], "is in few bits already"),
    ],
)
def test_choices_that_do_not_fit(
    dense: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "narrow" in flags:
        save_model(dense.parent / "narrow", dense_model(), GOLDENS / "tokenizer_bpe")
    if "ternary" in flags:
        record = find("bitnet")
        model = record.build(record.config.from_hub({**record.tiny, "vocab_size": 520}))
        save_model(dense.parent / "ternary", model, GOLDENS / "tokenizer_bpe")
    flags = [str(dense.parent / each) if each in ("narrow", "ternary") else each for each in flags]
    assert main(flags_of(dense, *flags)) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_a_full_disk_is_found_before_the_run(
    dense: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("mlx_mmfree.files.writing.shutil.disk_usage", lambda folder: usage)
    assert main(flags_of(dense)) == 2
    assert "are needed" in capsys.readouterr().err
    assert not (dense.parent / "run" / "windows").exists()


@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_the_plan_needs_no_weights(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dense / "model.safetensors").unlink()
    assert main(flags_of(dense, "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "Planned memory on" in out and "of the disk" in out and "Epochs in a night" in out


def test_stock_mlx_lm_computes_the_same(dense: Path, unfused: None) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    assert main(flags_of(dense, "--group-size", "128")) == 0
    folder = dense.parent / "run" / "model"
    theirs, _ = load_with_mlx_lm(folder)
    theirs.set_dtype(mx.float32)
    tokens = mx.array([[1, 5, 9, 2, 7]])
    got = load_model(folder, dtype=mx.float32)(tokens)[0]
    assert relative_error(got, theirs(tokens)) <= TOLERANCE[mx.float32]


@pytest.mark.interop
def test_llama_cpp_gives_its_text(dense: Path) -> None:
    """Its blocks of 64 hold the scale of 128 inputs twice."""
    from tests.hub.test_gguf_q2_0 import assert_texts_are_those_of_llama_cpp

    assert main(flags_of(dense, "--group-size", "128")) == 0
    source, target = dense.parent / "run" / "model", dense.parent / "gguf"
    flags = ["--to", "gguf", "--gguf-type", "q2_0", "--output", str(target)]
    assert main(["convert", "--model", str(source), *flags]) == 0
    (file,) = target.glob("*.gguf")
    assert_texts_are_those_of_llama_cpp(file, load_model(file), [5, 77, 130, 9, 260])


@pytest.mark.exhaustive
def test_perplexity_takes_it(
    dense: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(flags_of(dense)) == 0
    folder = dense.parent / "run" / "model"
    text = str(dense.parent / "train.txt")
    assert main(["perplexity", "--model", str(folder), "--data", text]) == 0
    assert "perplexity" in capsys.readouterr().out.lower()


@pytest.mark.exhaustive
def test_its_gguf_has_the_same_text(dense: Path) -> None:
    assert main(flags_of(dense, "--group-size", "128")) == 0
    folder = dense.parent
    flags = ["--model", str(folder / "run/model"), "--to", "gguf", "--gguf-type", "q2_0"]
    assert main(["convert", *flags, "--output", str(folder / "gguf")]) == 0
    (file,) = (folder / "gguf").glob("*.gguf")
    texts = [
        generate(*load(source, dtype=mx.float32), "The dog", max_tokens=12)
        for source in (folder / "run/model", file)
    ]
    assert texts[0] == texts[1]


def test_ternarize_goes_on_from_it(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It begins with the same trits and scales, and the dense model teaches it."""
    assert main(flags_of(dense)) == 0
    folder = dense.parent
    first = load_model(folder / "run" / "model")
    flags = ["ternarize", "--model", str(dense), "--output", str(folder / "further")]
    flags += ["--data", str(folder / "train.txt"), "--sequence-length", "16", "--batch-size", "2"]
    flags += ["--steps", "1", "--learning-rate", "1e-12", "--keep-embedding"]
    assert main([*flags, "--init-from", str(folder / "run" / "model")]) == 0
    further = load_model(folder / "further" / "model")
    tokens = mx.array([[1, 5, 9, 2]])
    assert relative_error(further(tokens)[0], first(tokens)[0]) <= TOLERANCE[mx.float16]
    save_model(folder / "other", dense_model(hidden_size=64), GOLDENS / "tokenizer_bpe")
    flags[flags.index("--output") + 1] = str(folder / "third")
    assert main([*flags, "--init-from", str(folder / "other")]) == 2
    assert "--init-from must be a model of the shape of --model" in capsys.readouterr().err


@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_weights_that_do_not_fit_change_by_a_low_rank(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CalibrateSettings(**_settings(dense))
    assert Calibration(settings).course.modulation.rank is None
    small = replace(device_info(), memory_bytes=1_000_000)
    monkeypatch.setattr("mlx_mmfree.training.memory.device_info", lambda: small)
    assert Calibration(settings).course.modulation.rank == 64
    assert Calibration(replace(settings, rank=4)).course.modulation.rank == 4
