"""The operations and hours of a distillation, estimated before it begins."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import native
from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.files.reading import write_json
from mlx_mmfree.hub import save_model
from mlx_mmfree.models import find
from mlx_mmfree.training.distil.distil import Distillation
from mlx_mmfree.training.distil.settings import DistilSettings
from mlx_mmfree.training.distil.student import MACHINES, Effort
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import HubServer

SHAPE = {
    "model_type": "llama",
    "vocab_size": 520,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
L = 32
# multiplications and additions of a layer for a token, by hand
ATTENTION = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64)
SCORES = sum(2 * 2 * 64 * (position + 1) for position in range(L)) // L
MLGRU = 2 * 4 * 64 * 64
FEED_FORWARD = 2 * 3 * 64 * 96
HEAD = 2 * 520 * 64
TEACHER = 4 * (ATTENTION + SCORES + FEED_FORWARD)
# the last layer keeps its attention
STUDENT = TEACHER + 3 * (MLGRU - ATTENTION - SCORES)


def described(folder: Path, **changes: Any) -> DistilSettings:
    """The settings of a run whose teacher is a `config.json` alone."""
    folder.mkdir()
    sizes = {name: changes.pop(name) for name in SHAPE.keys() & changes}
    write_json(folder / "config.json", {**SHAPE, "torch_dtype": "float32", **sizes})
    given: dict[str, Any] = {"batch_size": 2, "accumulation_steps": 3, "sequence_length": L}
    given |= {"mixers_steps": 5, "hidden_steps": 7, "logits_steps": 11, "text_steps": 13}
    path = str(folder.parent / "run")
    given |= {"model": str(folder), "output": path, "to": ("mlgru",), "data": ("a.txt",)}
    return DistilSettings(**{**given, "keep_layers": (3,), **changes})


def test_the_operations_are_those_counted_by_hand(tmp_path: Path) -> None:
    run = Distillation(described(tmp_path / "teacher"), only_plans=True)
    assert run.efforts() == {
        "mixers": Effort(5 * 6 * L, TEACHER + 3 * (ATTENTION + SCORES) + 3 * 3 * MLGRU),
        "hidden": Effort(7 * 6 * L, TEACHER + 2 * STUDENT + 3 * MLGRU),
        "logits": Effort(11 * 6 * L, TEACHER + HEAD + 3 * (STUDENT + HEAD)),
        "text": Effort(13 * 6 * L, 3 * (STUDENT + HEAD)),
    }


def test_what_is_computed_again_counts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = described(tmp_path / "teacher", grad_checkpoint=True)
    again = Distillation(settings, only_plans=True).efforts()
    assert again["text"].operations == 4 * STUDENT + 3 * HEAD
    staying = described(tmp_path / "third", keep_embedding=True)
    assert Distillation(staying, only_plans=True).efforts()["text"].operations == (
        3 * STUDENT + 2 * HEAD
    )
    # the logits of a large vocabulary are computed in blocks, by teacher and student
    for limit in ("_WHOLE", "_BLOCK"):
        monkeypatch.setattr(f"mlx_mmfree.training.losses.loss.{limit}", 1)
    blocks = Distillation(settings, only_plans=True).efforts()
    assert blocks["logits"].operations == TEACHER + 2 * HEAD + 4 * (STUDENT + HEAD)
    described_run = described(tmp_path / "other", teacher_top_k=8, cache_logits=True)
    cached = Distillation(described_run, only_plans=True).efforts()
    assert cached["logits"].operations == TEACHER + HEAD + 3 * STUDENT + 4 * HEAD
    assert described_run.logits_bytes == 11 * 6 * L * 8 * (4 + 2)


def test_hours_are_operations_over_the_rate() -> None:
    effort = Effort(tokens=1000, operations=10**12)
    for name, machine in MACHINES.items():
        assert effort.hours(name) * 3600 * machine.rate == pytest.approx(1e15)
    # a step of `benchmarks/training.py`, from its tokens a second with two threads and its shapes
    layer = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768) + 2 * 256 * 257
    measured = 6532 * 3 * (4 * layer + 2 * 2048 * 256)
    assert MACHINES["2 CPU cores"].rate == pytest.approx(measured, rel=0.01)


def test_chips_have_a_share_of_their_bound() -> None:
    # 10 and 40 GPU cores of 128 lanes, with two operations in a multiply-add
    assert MACHINES["M4"].rate == pytest.approx(0.3 * 2 * 10 * 128 * 1.578e9)
    assert MACHINES["M4 Max"].rate == pytest.approx(0.3 * 2 * 40 * 128 * 1.578e9)


@pytest.mark.exhaustive
@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_a_description_plans_what_the_weights_do(tmp_path: Path) -> None:
    settings = described(tmp_path / "teacher")
    alone = Distillation(settings, only_plans=True)
    record = find("llama")
    save_model(tmp_path / "whole", record.build(record.config.from_hub(SHAPE)))
    whole = Distillation(
        described(tmp_path / "other", model=str(tmp_path / "whole")), only_plans=True
    )
    for dtype in (None, mx.bfloat16):
        sizes = [{name: p.total for name, p in r.plans(dtype).items()} for r in (alone, whole)]
        assert sizes[0] == sizes[1]
    # a teacher in 16 bits takes half; what the student keeps of one in 32 bits does not
    in_full, in_half = (alone.plans(dtype)["mixers"].weights for dtype in (None, mx.bfloat16))
    weights = sum(entry.nbytes for entry in whole._opened.checkpoint.tensors.values())
    assert in_full - in_half == weights // 2
    write_json(tmp_path / "teacher" / "config.json", {**SHAPE, "torch_dtype": "bfloat16"})
    halves = Distillation(settings, only_plans=True)
    attention = 3 * ATTENTION // 2
    of_student = weights // 4 - attention
    assert in_half - halves.plans(mx.bfloat16)["mixers"].weights == 2 * of_student


@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_a_ternary_plan_needs_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = described(tmp_path / "teacher", intermediate_size=128)
    flags = ["--model", settings.model, "--output", settings.output, "--data", "a.txt"]
    flags += ["--sequence-length", str(L), "--batch-size", "2", "--steps", "5", "--dry-run"]
    assert main(["ternarize", *flags]) == 0
    row = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("all"))
    forward = 4 * (ATTENTION + SCORES + 2 * 3 * 64 * 128)
    assert f" {5 * 2 * L * (forward + HEAD + 3 * (forward + HEAD)):.2e} " in row
    assert main(["ternarize", *flags, "--rotation", "64"]) == 0
    assert not Path(settings.output).exists()


def test_only_a_plan_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = described(tmp_path / "teacher")
    flags = [
        "--model",
        settings.model,
        "--output",
        settings.output,
        "--to",
        "mlgru",
        "--data",
        "a.txt",
    ]
    assert main(["distil", *flags, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "hours, H100" in shown and "Estimates" in shown
    assert not Path(settings.output).exists()
    assert main(["distil", *flags]) == 2
    assert "must hold model.safetensors" in capsys.readouterr().err.replace("\n", " ")
    write_json(tmp_path / "teacher" / "config.json", {**SHAPE, "torch_dtype": "int8"})
    with pytest.raises(CheckpointError, match="'dtype' must be float32, float16 or bfloat16"):
        Distillation(settings, only_plans=True)


@pytest.mark.exhaustive
def test_a_dry_run_downloads_the_configuration_alone(tmp_path: Path) -> None:
    record = find("llama")
    save_model(tmp_path / "teacher", record.build(record.config.from_hub(SHAPE)))
    packed = find("bitnet")
    save_model(tmp_path / "packed", packed.build(packed.config.from_hub(packed.tiny)))
    folders = {f"me/{name}": tmp_path / name for name in ("teacher", "packed")}
    flags = ("--output", str(tmp_path / "run"), "--to", "mlgru", "--data", "a.txt", "--dry-run")
    with HubServer(folders) as hub, HubClient(hub.url, tmp_path / "home") as client:
        for _ in range(2):
            status, shown, errors = client.call(
                "command", "distil", "--model", "me/teacher", *flags
            )
            assert status == 0 and "hours, H100" in shown, errors
            assert hub.downloaded() == ["config.json"]
        # what was left out comes when it is needed
        assert len(client.call("logits", "me/teacher")[0][0]) == 520
        assert "model.safetensors" in hub.downloaded()
        before = len(hub.downloaded())
        assert client.call("command", "distil", "--model", "me/packed", *flags)[0] == 0
        assert "model.safetensors" in hub.downloaded()[before:]
