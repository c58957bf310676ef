"""`mmfree lora` with a teacher and a warm-up of quantisation."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli.lora import main
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.models import hgrn_bit
from mlx_mmfree.training.results import read_log
from tests.cli.test_lora import GOLDENS, QUICK, _flags, data, masters

__all__ = ["data", "masters"]


def steps(run: Path) -> list[float]:
    return [r["loss"] for r in read_log(run / "log.jsonl") if "loss" in r]


@pytest.mark.exhaustive
def test_a_teacher_adds_to_the_loss(masters: Path, folder: Path, data: Path) -> None:
    losses = {}
    for run, teacher in {
        "alone": (),
        "all": ("--teacher", str(folder)),
        "more": ("--teacher", str(folder), "--teacher-weight", "2"),
        "some": ("--teacher", str(folder), "--teacher-top-k", "8", "--teacher-temperature", "2"),
    }.items():
        flags = [*_flags(masters, data, run), *QUICK, "--iters", "1", "--train"]
        assert main([*flags, "--num-layers", "1", *teacher]) == 0
        [losses[run]] = steps(data.parent / run)
    added = losses["all"] - losses["alone"]
    assert added > 0
    assert losses["more"] - losses["alone"] == pytest.approx(2 * added, rel=1e-4)
    assert losses["some"] not in (losses["alone"], losses["all"])


@pytest.mark.exhaustive
def test_a_run_goes_on_with_its_own_teacher_alone(
    masters: Path, folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = shutil.copytree(folder, tmp_path / "teacher")
    flags = [*_flags(masters, data), *QUICK, "--train", "--teacher"]
    assert main([*flags, str(teacher), "--iters", "2"]) == 0
    teacher.rename(tmp_path / "elsewhere")
    assert main([*flags, str(tmp_path / "elsewhere"), "--iters", "3"]) == 0
    model = load_model(folder)
    model.norm.weight = model.norm.weight * 2
    save_model(teacher, model, GOLDENS / "tokenizer_bpe")
    for other in ([*flags, str(teacher)], flags[:-1]):
        capsys.readouterr()
        assert main([*other, "--iters", "4"]) == 2
        assert "holds a run with other values of teacher. " in capsys.readouterr().err
    assert len(steps(data.parent / "run")) == 3


@pytest.mark.exhaustive
def test_the_warm_up_begins_without_quantisation(masters: Path, data: Path) -> None:
    full = [*QUICK, "--iters", "1", "--train", "--fine-tune-type", "full"]
    losses = {}
    for run, flags in {"cold": (), "warm": ("--quantization-warmup", "1")}.items():
        assert main([*_flags(masters, data, run), *full, *flags]) == 0
        [losses[run]] = steps(data.parent / run)
    assert losses["cold"] != losses["warm"]


def test_refused(
    masters: Path, folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mx.random.seed(0)
    larger = hgrn_bit.Config(
        vocab_size=520, hidden_size=32, num_hidden_layers=1, intermediate_size=48
    )
    save_model(tmp_path / "larger", hgrn_bit.build(larger), GOLDENS / "tokenizer_bpe")
    other = shutil.copytree(folder, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    for flags, reason in (
        (("--teacher", str(tmp_path / "larger")), "518 tokens but has 520"),
        (
            ("--teacher", str(other)),
            "must have the tokens of the model that is trained but its token",
        ),
        (("--teacher", str(folder), "--teacher-top-k", "1"), "--teacher-top-k must be from 2"),
        (("--teacher-top-k", "4"), "--teacher-top-k must come with --teacher"),
        (("--teacher", str(folder), "--teacher-weight", "0"), "--teacher-weight must be positive"),
        (("--quantization-warmup", "4"), "must be 0 for a model without ternary layers"),
    ):
        assert main([*_flags(folder, data), *QUICK, "--train", *flags]) == 2
        assert reason in capsys.readouterr().err
    assert not (data.parent / "run" / "adapters.safetensors").exists()
