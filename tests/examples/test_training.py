"""The benchmark of training steps: what it prints, and which flags it refuses."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import training
from training import Run, Setup, benchmark_training, main

from mlx_mmfree.errors import MeasurementError

TINY = Setup(
    hidden_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate_size=40,
    vocab_size=50,
    batch_size=2,
    length=9,
    steps=2,
)


@pytest.fixture(autouse=True)
def in_this_process(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "measure", here)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--threads", "1", "2"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["setup"]["hidden_size"] == 32
    found = [(figure["program"], figure["threads"]) for figure in shown["metrics"]]
    assert found == [("dense", 1), ("ternary", 1), ("dense", 2), ("ternary", 2)]
    assert all(figure["tokens_per_processor_second"] > 0 for figure in shown["metrics"])


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--threads", "1", "--layers", "2"]) == 0
    heading, dense, ternary = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["threads", "program"]
    assert dense.split()[:2] == ["1", "dense"] and dense.endswith(" 100 %")
    assert ternary.split()[:2] == ["1", "ternary"]


def test_adapters_beside_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--compare", "lora", "--threads", "1"]) == 0
    _, dense, ternary, codes = capsys.readouterr().out.splitlines()
    assert dense.split()[1:3] == ["lora", "dense"] and dense.endswith(" 100 %")
    assert ternary.split()[2] == "ternary" and codes.split()[2] == "2-bit"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--heads", "3"], "--hidden-size must be a multiple of heads, 3, but got 256"),
        (["--kv-heads", "3"], "--heads must be a multiple of kv_heads, 3, but got 8"),
        (["--hidden-size", "24", "--kv-heads", "8"], "an even number of dims but got 24 for 8"),
        (["--compare", "jax"], "choose from"),
        (["--steps", "0"], "--steps"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_what_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--hidden-size", "256", "--heads", "8", *flags]) == 2
    assert words in capsys.readouterr().err


def test_pytorch_must_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    assert main(["--quick", "--compare", "torch"]) == 2
    assert "needs the package torch" in capsys.readouterr().err


@pytest.mark.interop
def test_pytorch_trains_the_same_model() -> None:
    pytest.importorskip("torch")
    dense, torch = (training._measure(name, TINY, 1) for name in ("dense", "torch"))
    assert len(dense.losses) == len(torch.losses) == 4
    assert np.allclose(dense.losses, torch.losses, rtol=1e-5)


def test_losses_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {
        "dense": Run([1.0], [1.0], [3.0, 2.0]),
        "torch": Run([1.0], [1.0], [3.0, 2.1]),
    }
    monkeypatch.setattr(training, "_measure", lambda program, setup, threads: runs[program])
    with pytest.raises(MeasurementError, match="the loss of step 1 must be PyTorch's"):
        list(benchmark_training(TINY, ["dense", "torch"], [1], 1))


def test_a_process_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    odd = replace(TINY, heads=0)
    with pytest.raises(MeasurementError, match="'num_attention_heads' must be"):
        list(benchmark_training(odd, ["dense"], [1], 1))
