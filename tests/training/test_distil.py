"""A transformer becomes a model with other token mixers, which learns from it stage by stage."""

import gc
import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_mmfree import native
from mlx_mmfree.cli import main
from mlx_mmfree.errors import TrainingError
from mlx_mmfree.files.writing import try_lock_file
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.mixers import MixerChoice
from mlx_mmfree.models.parts.transformer import ATTENTION
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.distil.distil import Distillation, hidden_loss, mixer_loss
from mlx_mmfree.training.distil.settings import DistilSettings, read_settings
from mlx_mmfree.training.distil.student import (
    base_config,
    build_student,
    mixers_of,
    replaced_layers,
    student_config,
)
from mlx_mmfree.training.memory import MemoryPlan
from mlx_mmfree.training.results import read_log
from mlx_mmfree.training.trainer import Trainer
from tests.hub.checkpoints import GOLDENS
from tests.tolerances import TOLERANCE, relative_error

ROWS = np.random.default_rng(0).integers(0, 60, (3, 13)).astype(np.int32)
MLGRU = [MixerChoice("mlgru")]


def teacher_of(kind: str = "llama", **changes: Any) -> Decoder:
    record = find(kind)
    mx.random.seed(1)
    model: Decoder = record.build(record.config.from_hub({**record.tiny, **changes}))
    # the draw of 0.02 leaves attention without any pattern
    model.update(
        tree_map(lambda array: array * 6 if array.ndim == 2 else array, model.parameters())
    )
    return model


def student_of(teacher: Decoder, to: list[MixerChoice], **options: Any) -> Decoder:
    base = base_config(teacher)
    mixers = mixers_of(base, to, options.pop("keep_layers", ()))
    return build_student(teacher, student_config(base, mixers, None), 0, **options)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "bitnet"])
def test_with_its_attention_the_student_is_the_teacher(kind: str) -> None:
    teacher = teacher_of(kind)
    student = student_of(teacher, [MixerChoice("same")])
    assert student.config == teacher.config
    tokens = mx.array(ROWS)
    assert mx.array_equal(student(tokens)[0], teacher(tokens)[0])


def test_new_mixers_begin_as_attention_where_they_can() -> None:
    teacher = teacher_of()
    window = MixerChoice("sliding_window_attention", {"window": 64})
    student = student_of(teacher, [MixerChoice("mlgru"), window])
    attention, mlgru = teacher.blocks[0].token_mixer, student.blocks[0].token_mixer
    values = np.array(attention.value_proj.weight).reshape(2, 8, 32)
    # each of two heads of values serves two heads of queries
    assert np.array_equal(np.array(mlgru.input_proj.weight), values[[0, 0, 1, 1]].reshape(32, 32))
    assert mx.array_equal(mlgru.output_proj.weight, attention.output_proj.weight)
    # a window that is wider than the text is attention
    x = mx.random.normal((2, 9, 32))
    own, of_teacher = student.blocks[1].token_mixer, teacher.blocks[1].token_mixer
    assert mx.allclose(own(x)[0], of_teacher(x)[0], atol=1e-6)
    partial_student = student_of(teacher, MLGRU, keep_layers=(1,))
    assert replaced_layers(partial_student) == [0]
    assert partial_student.config.token_mixers[1] == MixerChoice(ATTENTION)


def test_a_window_rotates_as_the_attention_of_the_teacher() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    teacher = teacher_of(rope_scaling=scaling)
    window = MixerChoice("sliding_window_attention", {"window": 64})
    student = student_of(teacher, [window])
    x = mx.random.normal((2, 40, 32))
    own, wanted = (model.blocks[1].token_mixer(x)[0] for model in (student, teacher))
    assert relative_error(own, wanted) <= TOLERANCE[mx.float32]
    plain = student_of(teacher_of(), [window]).blocks[1].token_mixer(x)[0]
    assert relative_error(plain, wanted) > 100 * TOLERANCE[mx.float32]


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    spread = np.square(wanted - wanted.mean(axis=(0, 1))).sum()
    return float(np.square(got - wanted).sum() / spread)


def streams(model: Decoder) -> list[np.ndarray]:
    """The input of each block and the output of the last, block after block."""
    x = model.embed(mx.array(ROWS[:, :-1]))
    found = [np.array(x)]
    for block in model.blocks:
        x, _ = block(x)
        found.append(np.array(x))
    return found


def test_the_loss_of_mixers_side_by_side() -> None:
    teacher = teacher_of()
    student = student_of(teacher, MLGRU)
    errors = []
    for x, block, own in zip(streams(teacher), teacher.blocks, student.blocks, strict=False):
        normed = block.token_norm(mx.array(x))
        pair = [np.array(each.token_mixer(normed)[0]) for each in (own, block)]
        errors.append(relative(*pair))
    want = np.mean(errors) * ROWS[:, 1:].size
    got = mixer_loss(teacher, [0, 1])(student, Batch.of_rows(ROWS))
    assert got.item() == pytest.approx(want, rel=TOLERANCE[mx.float32])
    constant = student_of(teacher, MLGRU)
    for block in constant.blocks:
        block.token_mixer.output_proj.weight = mx.zeros((32, 32))
    # nothing at all is no closer than the mean
    assert mixer_loss(teacher, [0, 1])(constant, Batch.of_rows(ROWS)).item() >= ROWS[:, 1:].size


def test_the_loss_of_the_residual_stream() -> None:
    teacher = teacher_of()
    student = student_of(teacher, MLGRU)
    pairs = list(zip(streams(student), streams(teacher), strict=True))[1:]
    want = np.mean([relative(*pair) for pair in pairs]) * ROWS[:, 1:].size
    got = hidden_loss(teacher)(student, Batch.of_rows(ROWS))
    assert got.item() == pytest.approx(want, rel=TOLERANCE[mx.float32])
    assert teacher.run_block is student.run_block


@pytest.fixture
def teacher_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    save_model(folder, teacher_of(vocab_size=520), GOLDENS / "tokenizer_bpe")
    (tmp_path / "train.txt").write_text("The dog sees the cat. A number is a number. " * 60)
    (tmp_path / "valid.txt").write_text("The cat sees a number. " * 20)
    return folder


def settings_of(teacher: Path, name: str, **changes: Any) -> DistilSettings:
    stages = {f"{stage}_steps": 4 for stage in ("mixers", "hidden", "logits", "text")}
    given: dict[str, Any] = {
        **stages,
        "model": str(teacher),
        "output": str(teacher.parent / name),
        "to": ("mlgru",),
        "data": (str(teacher.parent / "train.txt"),),
        "valid": (str(teacher.parent / "valid.txt"),),
        "batch_size": 2,
        "sequence_length": 16,
        "valid_tokens": 64,
        "steps_per_eval": 2,
        "save_every": 1,
    }
    return DistilSettings(**{**given, **changes})


@pytest.fixture(autouse=True)
def without_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_mmfree.training.trainer.plot_run", lambda *_: True)


@pytest.mark.exhaustive
def test_each_stage_brings_the_student_closer(teacher_folder: Path) -> None:
    settings = settings_of(teacher_folder, "run", mixers_steps=40, hidden_steps=20, text_steps=0)
    report = Distillation(settings).run()
    path = Path(settings.output)
    assert json.loads((path / "distil.json").read_text()) == json.loads(json.dumps(report))
    metrics = report["metrics"]
    assert list(metrics) == ["teacher", "begin", "mixers", "hidden", "logits"]
    assert all(set(each) == {"valid/bits_per_byte"} for each in metrics.values())
    for stage in ("mixers", "hidden"):
        log = read_log(path / "stages" / stage / "log.jsonl")
        losses = [line["valid_loss"] for line in log if "valid_loss" in line]
        assert min(losses) < losses[0]
    student = load_model(path / "model")
    assert student.config.to_hub()["model_type"] == "hybrid"
    embed = load_model(teacher_folder).embed.weight
    assert student.embed.weight.shape == embed.shape


def test_only_mixers_learn_before_the_logits(teacher_folder: Path) -> None:
    settings = settings_of(teacher_folder, "run", logits_steps=0, text_steps=0)
    run = Distillation(settings)
    run.run()
    student = dict(tree_flatten(load_model(Path(settings.output) / "model").parameters()))
    for name, array in tree_flatten(run.teacher.parameters()):
        if "token_mixer" not in name:
            assert mx.array_equal(student[name], array), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ternary": True},
        {"cache_logits": True, "teacher_top_k": 8},
        {"dtype": "bfloat16", "keep_embedding": True, "optimizer": "adamw8bit"},
    ],
    ids=["dense", "ternary", "cached", "small"],
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    teacher_folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "dtype" in changes:
        compute_as_on_a_gpu(monkeypatch)
        put_larger_teacher(teacher_folder)

    def bits(name: str) -> bytes:
        kind = "masters" if changes.get("ternary") else "model"
        return (teacher_folder.parent / name / kind / "model.safetensors").read_bytes()

    Distillation(settings_of(teacher_folder, "whole", **changes)).run()

    class Stop(Exception):
        pass

    save = Trainer._save
    saved = 0

    def stop(self: Any) -> None:
        nonlocal saved
        save(self)
        saved += 1
        # once in the middle of each stage
        if saved % 4 == 2:
            raise Stop

    monkeypatch.setattr(Trainer, "_save", stop)
    settings = settings_of(teacher_folder, "stopped", **changes)
    stops = 0
    while True:
        try:
            Distillation(settings).run()
            break
        except Stop:
            stops += 1
    assert stops == 4
    assert bits("stopped") == bits("whole")


def test_a_ternary_student_is_packed(teacher_folder: Path) -> None:
    settings = settings_of(teacher_folder, "run", ternary=True, to=("same",))
    report = Distillation(settings).run()
    assert list(report["metrics"]) == ["teacher", "begin", "logits", "text"]
    student = load_model(Path(settings.output) / "model")
    assert student.config.to_hub()["model_type"] == "llama"
    assert any(isinstance(module, PackedBitLinear) for module in student.modules())


def test_the_command(teacher_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = teacher_folder.parent
    flags = ["--model", str(teacher_folder), "--output", str(folder / "run")]
    flags += ["--data", str(folder / "train.txt"), "--valid", str(folder / "valid.txt")]
    flags += ["--to", '{"name": "gla", "gate_rank": 4}', "hgrn2", "--keep-layers", "1"]
    flags += ["--mixers-steps", "2", "--hidden-steps", "0", "--logits-steps", "2"]
    flags += ["--sequence-length", "16", "--batch-size", "2"]
    assert main(["distil", *flags]) == 0
    shown = capsys.readouterr().out
    assert "valid/bits_per_byte" in shown and "each mixer by itself" in shown
    assert main(["generate", "--model", str(folder / "run/model"), "-p", "The", "-m", "3"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_layers": (7,)}, "'keep_layers' must hold numbers of layers from 0 to 1 but got 7"),
        ({"logits_steps": -1}, "'logits_steps' must be at least 0"),
        ({"mixers_rate": 0.0}, "'mixers_rate' must be positive and finite"),
        (
            {"quantization_warmup": 2},
            "'quantization_warmup' must be left out for a student without",
        ),
        ({"ternary": True, "quantization_warmup": 9}, "must be from 0 to 'logits_steps'"),
        (
            {"to": ("same",), "logits_steps": 0, "text_steps": 0},
            "must be positive where all layers",
        ),
        ({"data": ()}, "'data' must be at least one name"),
    ],
)
def test_settings_that_do_not_fit(
    teacher_folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message.replace("(", r"\(")):
        Distillation(settings_of(teacher_folder, "run", **changes)).run()


def test_a_teacher_of_another_kind_is_refused(teacher_folder: Path, tmp_path: Path) -> None:
    record = find("hgrn_bit")
    other = record.build(record.config.from_hub({**record.tiny, "vocab_size": 520}))
    save_model(tmp_path / "other", other, GOLDENS / "tokenizer_bpe")
    message = r"must be a transformer of the Llama family .* but is a hgrn_bit: its blocks differ"
    with pytest.raises(TrainingError, match=message):
        Distillation(settings_of(teacher_folder, "run", model=str(tmp_path / "other")))


def plans_of_a_run(settings: DistilSettings, *, as_on_a_gpu: bool = False) -> dict[str, MemoryPlan]:
    """Runs all stages, each of which must take what its plan says.

    The process is new, because arrays of other tests may come and go while a run is measured.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        plans, before = pool.submit(run_with_plans, settings, as_on_a_gpu).result()
    for stage, plan in plans.items():
        log = read_log(Path(settings.output) / "stages" / stage / "log.jsonl")
        peak = max(line.get("peak_memory_bytes", 0) for line in log) - before
        assert plan.total == pytest.approx(peak, rel=0.15), stage
    return plans


def run_with_plans(
    settings: DistilSettings, as_on_a_gpu: bool
) -> tuple[dict[str, MemoryPlan], int]:
    """The plans of the stages, and the bytes that arrays had before the first of them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if as_on_a_gpu:
            compute_as_on_a_gpu(monkeypatch)
        run = Distillation(settings)
        plans = run.plans()
        assert not Path(settings.output).exists()
        gc.collect()
        before = mx.get_active_memory()
        run.run()
    return plans, before


@pytest.mark.exhaustive
@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_the_planned_memory_is_what_a_run_takes(teacher_folder: Path) -> None:
    lengths = {"batch_size": 4, "sequence_length": 96, "valid": (), "ternary": True}
    settings = settings_of(teacher_folder, "run", **lengths)
    plans_of_a_run(settings)


def compute_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_mmfree.training.precision.on_cpu", lambda: False)
    monkeypatch.setattr("mlx_mmfree.training.optimizer_step._GROUP", 2**18)


def put_larger_teacher(folder: Path) -> None:
    """Replaces the teacher in a folder by a larger one in bfloat16."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    teacher = teacher_of(vocab_size=520, **sizes)
    teacher.set_dtype(mx.bfloat16)
    shutil.rmtree(folder)
    save_model(folder, teacher, GOLDENS / "tokenizer_bpe")


@pytest.mark.exhaustive
@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled extension reads graphs")
def test_a_run_in_little_memory(teacher_folder: Path) -> None:
    put_larger_teacher(teacher_folder)
    small = {"dtype": "bfloat16", "optimizer": "adamw8bit", "grad_checkpoint": True}
    small |= {"keep_embedding": True, "cache_logits": True, "teacher_top_k": 8}
    small |= {"batch_size": 1, "sequence_length": 16, "valid": ()}
    settings = settings_of(teacher_folder, "run", **small)
    plans = plans_of_a_run(settings, as_on_a_gpu=True)
    # embedding and head are held in 16 bits, and written as they were
    assert plans["logits"].weights == 2 * 2 * 520 * 128
    student = load_model(Path(settings.output) / "model")
    own = dict(tree_flatten(student.parameters()))
    teacher = dict(tree_flatten(load_model(teacher_folder).parameters()))
    same = {name for name in teacher if name in own and mx.array_equal(own[name], teacher[name])}
    assert same == {"embed.weight", "head.weight"}


def test_another_run_is_kept_out(teacher_folder: Path) -> None:
    settings = settings_of(teacher_folder, "busy")
    Path(settings.output).mkdir()
    lock = try_lock_file(Path(settings.output) / ".lock")
    assert lock is not None
    with pytest.raises(TrainingError, match="must be the folder of one run at a time"):
        Distillation(settings).run()
    assert [file.name for file in Path(settings.output).iterdir()] == [".lock"]
    os.close(lock)


def test_settings_come_from_a_file_and_flags(
    teacher_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = teacher_folder.parent
    file = folder / "distil.yaml"
    file.write_text(
        f"model: {teacher_folder}\noutput: {folder / 'run'}\ndata: {folder / 'train.txt'}\n"
        "to: [{name: gla, gate_rank: 4}, same]\nlogits_rate: 1e-4\nbatch_size: 2\n"
    )
    settings = read_settings(file, {"batch_size": 3, "valid": None}, DistilSettings)
    assert settings.to == ({"name": "gla", "gate_rank": 4}, "same")
    assert (settings.batch_size, settings.logits_rate) == (3, 1e-4)
    assert settings.data == (str(folder / "train.txt"),)
    assert main(["distil", "-c", str(file), "--dry-run"]) == 0
    capsys.readouterr()
    for text, message in (
        ("to: mlgru\n", "--model must be given, as a flag or in the file"),
        ("model: a\noutput: b\nto: mlgru\ndata: c\nspeed: 1\n", "unknown keys speed"),
        ("model: a\noutput: b\nto: 3\ndata: c\n", "--to must hold texts or mappings but holds 3"),
        ("model: a\noutput: b\nto: mlgru\ndata: c\nseed: x\n", "'seed' must be a whole number"),
        ("model: 5\noutput: b\nto: mlgru\ndata: c\n", "'model' must be text"),
    ):
        file.write_text(text)
        assert main(["distil", "-c", str(file)]) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_dry_run_writes_nothing(teacher_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = teacher_folder.parent
    flags = ["--model", str(teacher_folder), "--output", str(folder / "run"), "--to", "mlgru"]
    assert main(["distil", *flags, "--data", str(folder / "train.txt"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "The stage 'logits' takes the most memory." in shown and "Planned memory" in shown
    assert not (folder / "run").exists()
    for wrong in ("--data", "--valid"):
        named = {"--data": "train.txt", "--valid": "valid.txt"} | {wrong: "absent.txt"}
        more = [word for flag, name in named.items() for word in (flag, str(folder / name))]
        # a plan needs no texts, but tells which are missing
        assert main(["distil", *flags, *more, "--dry-run"]) == 0
        error = capsys.readouterr().err
        named = f"'{wrong[2:]}' must name files that can be read but '{folder / 'absent.txt'}'"
        assert f"note: [distil] {named}" in error
    (folder / "empty.txt").touch()
    assert main(["distil", *flags, "--data", str(folder / "empty.txt"), "--dry-run"]) == 0
    assert f"'{folder / 'empty.txt'}' is empty. Put texts into it" in capsys.readouterr().err
