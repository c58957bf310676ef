"""`mmfree lora` on a tiny checkpoint, from JSON lines to an adapter that loads."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import yaml

from mlx_mmfree import demo
from mlx_mmfree.cli.generate import main as generate
from mlx_mmfree.cli.lora import build_parser, main
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.models import hgrn_bit
from mlx_mmfree.training.results import read_log
from mlx_mmfree.training.run_folder import own_run_folder
from tests.tolerances import TOLERANCE, relative_error

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
ROOT = Path(__file__).parents[2]
QUICK = ["--iters", "4", "--batch-size", "2", "--steps-per-report", "1", "--steps-per-eval", "2"]
QUICK += ["--save-every", "2"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in (("train", 6), ("valid", 2), ("test", 2)):
        lines = [{"prompt": f"Number {n}?", "completion": "The cat. " * n} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with float masters."""
    mx.random.seed(5)
    config = hgrn_bit.Config(
        vocab_size=518, hidden_size=32, num_hidden_layers=2, intermediate_size=48
    )
    target = tmp_path_factory.mktemp("masters") / "tiny"
    save_model(target, hgrn_bit.build(config), GOLDENS / "tokenizer_bpe")
    return target


def _flags(folder: Path, data: Path, run: str = "run") -> list[str]:
    return ["--model", str(folder), "--data", str(data), "--adapter-path", str(data.parent / run)]


def _losses(run: Path) -> list[float]:
    return [
        r[key] for r in read_log(run / "log.jsonl") for key in ("loss", "valid_loss") if key in r
    ]


def test_trains_tests_and_the_adapter_is_read(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = _flags(folder, data)
    assert main([*flags, *QUICK, "--train", "--test", "--learning-rate", "1e-2"]) == 0
    out = capsys.readouterr().out
    assert "train: 6 samples, " in out and "valid: 2 samples, " in out
    assert "parameters (" in out and "in 24 tensors of 12 layers: lora." in out
    assert " tokens, peak memory 0." in out
    assert "Validation loss " in out and f"Wrote the adapter to {data.parent / 'run'}." in out
    assert main([*flags, "--test"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]
    assert main([*flags[:-1], "", "--test"]) == 0
    base = capsys.readouterr().out.splitlines()[-1]
    assert base.startswith("Test loss ") and base != out.splitlines()[-1]
    adapter = ["--adapter-path", str(data.parent / "run")]
    assert generate(["--model", str(folder), *adapter, "--prompt", "The", "--max-tokens", "2"]) == 0


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_dry_run_prints_the_plan_and_writes_nothing(
    masters: Path, data: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    flags = [*_flags(masters, data), *QUICK, "--fine-tune-type", kind, "--grad-checkpoint"]
    assert main([*flags, "--train", "--test", "--dry-run"]) == 0
    plan = capsys.readouterr().out.splitlines()[-1]
    assert plan.startswith("Planned memory on cpu: ") and "trained weights" in plan
    assert not (data.parent / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--train", "--resume-adapter-file", "absent.safetensors"),
            "absent.safetensors' must be a",
        ),
        (("--test", "--adapter-path", "absent"), "--adapter-path must be a folder with an adapter"),
        (("--train", "--teacher", "absent"), "--teacher must be an existing folder or a Hub"),
    ],
)
def test_a_dry_run_looks_for_every_file(
    folder: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    assert main([*_flags(folder, data), *QUICK, *flags, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("iters: forty", "'iters' must be a whole number but got 'forty'"),
        ("model: 3", "'model' must be text but got 3"),
        ("test: 'no'", "'test' must be true or false but got 'no'"),
        ("report_to: [wandb]", "'report_to' must be text but got ['wandb']"),
        ("lora_parameters: {rank: high}", "'rank' must be a whole number but got 'high'"),
    ],
)
def test_a_wrong_value_in_a_file_names_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    (tmp_path / "lora.yaml").write_text(f"data: d\ntrain: true\n{line}\n")
    assert main(["--config", str(tmp_path / "lora.yaml")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("flag", [(), ("--dry-run",)])
def test_samples_without_anything_to_learn_are_refused(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str], flag: tuple[str, ...]
) -> None:
    flags = [*_flags(folder, data), *QUICK, "--train", "--mask-prompt", "--max-seq-length", "2"]
    assert main([*flags, *flag]) == 2
    error = capsys.readouterr().err
    train = data / "train.jsonl"
    assert f"error: [data] '{train}' must hold at least one sample with something to learn" in error
    assert error.count("\n") == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("content", ["", " \n\n\t\n"], ids=["empty", "blank lines"])
@pytest.mark.parametrize("mode", ["sft", "dpo"])
def test_a_validation_file_without_samples_is_left_out(
    folder: Path, data: Path, mode: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "A?", "chosen": f"b {n}", "rejected": "c"} for n in range(4)]
    if mode == "dpo":
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (data / "valid.jsonl").write_text(content)
    (data / "test.jsonl").write_text(content)
    assert main([*_flags(folder, data), *QUICK, "--train", "--train-mode", mode]) == 0
    shown = capsys.readouterr()
    assert f"'{data / 'valid.jsonl'}' has no samples to validate on" in shown.err
    assert "Without samples for validation, nothing is measured" in shown.out


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_file_without_samples_that_is_needed_is_named(
    folder: Path, data: Path, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / f"{split}.jsonl").write_text("\n \n")
    assert main([*_flags(folder, data), *QUICK, "--train", "--test"]) == 2
    shown = capsys.readouterr()
    assert f"error: [data] '{data / split}.jsonl' must hold at least one sample" in shown.err
    assert not (data.parent / "run/log.jsonl").exists()


@pytest.mark.exhaustive
def test_a_second_run_in_the_same_folder_is_refused(folder: Path, data: Path) -> None:
    flags = [*_flags(folder, data), "--train", "--iters", "100000", "--steps-per-report", "5"]
    command = [sys.executable, "-m", "mlx_mmfree", "lora", *flags]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    log = data.parent / "run/log.jsonl"
    try:
        deadline = time.monotonic() + 60
        while not (log.exists() and "learning_rate" in log.read_text()):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert second.stderr.startswith(
            f"error: [training] '{data.parent / 'run'}' must be the fol"
        )
        assert second.stderr.count("\n") == 1
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    # the lock of a killed process holds nobody up
    assert (data.parent / "run/.lock").exists()
    with own_run_folder(data.parent / "run"):
        pass
    assert not (data.parent / "run/.lock").exists()


def test_full_tuning_from_a_checkpoint_with_masters(masters: Path, data: Path) -> None:
    source = shutil.copytree(masters, data.parent / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n\n# Source\n")
    (source / "LICENSE").write_text("Permission is hereby granted")
    flags = [*_flags(source, data), *QUICK, "--fine-tune-type", "full"]
    assert main([*flags, "--train", "--test"]) == 0
    for name in ("model", "masters"):
        folder = data.parent / "run" / name
        assert (folder / "LICENSE").read_text() == "Permission is hereby granted"
        card = (folder / "README.md").read_text()
        assert "license: mit\n" in card and "All weights were trained for 4 steps" in card
        assert str(data.parent) not in card
    tuned = ["--model", str(data.parent / "run/model"), "--data", str(data), "--test"]
    assert main([*tuned, "--adapter-path", ""]) == 0


def test_packed_checkpoints_cannot_be_tuned_in_full(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_flags(folder, data), "--train", "--fine-tune-type", "full"]) == 2
    assert "Load the checkpoint that it was packed from" in capsys.readouterr().err


def test_the_packaged_model_is_tuned_in_full_with_masters_made_up(data: Path) -> None:
    flags = ["--data", str(data), "--adapter-path", str(data.parent / "run"), "--train"]
    flags += ["--fine-tune-type", "full", "--rebuild-masters", *QUICK, "--iters", "1"]
    flags += ["--num-layers", "1"]
    assert main(flags) == 0
    before, after = (
        load_model(path).blocks[0].token_mixer.input_proj
        for path in (demo.path(), data.parent / "run/model")
    )
    assert mx.array_equal(after.weight, before.weight)
    assert relative_error(after.scale, before.scale) <= TOLERANCE[mx.float32]
    assert load_model(data.parent / "run/masters", packed=False).vocab_size == 2048


def test_yaml_of_mlx_lm_and_flags_that_win(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: dict[str, Any] = {
        "model": str(folder),
        "train": True,
        "test": False,
        "fine_tune_type": "dora",
        "optimizer": "adamw",
        "optimizer_config": {"adam": {}, "adamw": {"weight_decay": 0.0}},
        "data": str(data),
        "seed": 0,
        "num_layers": 1,
        "batch_size": 2,
        "iters": 50,
        "learning_rate": "1e-5",
        "report_to": None,
        "adapter_path": str(data.parent / "run"),
        "lora_parameters": {"keys": ["attn.i_proj"], "rank": 8, "scale": 20.0, "dropout": 0.0},
        "lr_schedule": {"name": "cosine_decay", "arguments": ["1e-5", 10], "warmup": 2},
    }
    file = data.parent / "lora.yaml"
    file.write_text(yaml.safe_dump(values))
    assert main(["-c", str(file), "--iters", "2", "--rank", "2"]) == 0
    assert "in 3 tensors of 1 layer: dora." in capsys.readouterr().out
    config = json.loads((data.parent / "run/adapter_config.json").read_text())
    assert (config["fine_tune_type"], config["num_layers"]) == ("dora", 1)
    assert config["lora_parameters"]["rank"] == 2
    log = read_log(data.parent / "run/log.jsonl")
    assert [r["step"] for r in log if "loss" in r] == [2]


KILLED = """
import os, signal, sys
from mlx_mmfree.cli.lora import main
from mlx_mmfree.training.results import RunLog

def write(self, write=RunLog.write, **record):
    write(self, **record)
    if record.get("step") == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

RunLog.write = write
main(sys.argv[2:])
"""


@pytest.mark.exhaustive
def test_killed_process_resumes_to_the_same_log(masters: Path, data: Path) -> None:
    options = [*QUICK, "--iters", "40", "--train", "--pack"]
    options += ["--max-seq-length", "64", "--dropout", "0.2"]
    assert main([*_flags(masters, data, "whole"), *options]) == 0
    flags = [*_flags(masters, data), *options]
    for step in ("7", "20"):
        words = [sys.executable, "-c", KILLED, step, *flags]
        run = subprocess.run(words, cwd=ROOT, capture_output=True)
        assert run.returncode == -signal.SIGKILL, run.stderr
    assert 0 < len(_losses(data.parent / "run")) < len(_losses(data.parent / "whole"))
    assert main(flags) == 0
    assert _losses(data.parent / "run") == _losses(data.parent / "whole")
    for name in ("adapters.safetensors", "best.safetensors"):
        files = [data.parent / run / name for run in ("run", "whole")]
        contents = [file.read_bytes() if file.exists() else None for file in files]
        assert contents[0] == contents[1]


def test_records_go_to_wandb(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda record, step: calls.append((step, record)),
        finish=lambda: calls.append((None, {})),
    )
    module = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    reports = ["--report-to", "wandb", "--project-name", "cats"]
    assert main([*_flags(folder, data), *QUICK, "--train", *reports]) == 0
    assert (calls[0]["project"], calls[0]["name"]) == ("cats", "run")
    assert [step for step, record in calls[1:] if "loss" in record] == [1, 2, 3, 4]
    assert [step for step, record in calls[1:] if "valid_loss" in record] == [0, 2, 4]
    assert calls[-1] == (None, {})


def test_limits_of_memory_are_restored(folder: Path, data: Path) -> None:
    before = mx.set_cache_limit(123456789)
    limits = ["--cache-limit", "0.5", "--memory-limit", "8", "--clear-cache-threshold", "1MB"]
    try:
        assert main([*_flags(folder, data), *QUICK, "--train", *limits]) == 0
    finally:
        assert mx.set_cache_limit(before) == 123456789


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--train or --test must be given"),
        (["--train", "--keys", "q_proj"], "got 'q_proj'. The model has attn.f_proj"),
        (["--train", "--rank", "0"], "--rank must be positive but got 0"),
        (
            ["--train", "--report-to", "swanlab"],
            "--report-to must be wandb or tensorboard but got 'swanlab'",
        ),
        (["--train", "--clear-cache-threshold", "much"], "must be a size such as 500MB or 2GB"),
        (["--train", "--data", "absent"], "--data must be an existing file or folder of samples"),
        (["--test", "--adapter-path", "absent"], "--adapter-path must be a folder"),
        (
            ["--test", "--adapter-path", "/"],
            "--adapter-path must be a folder with an adapter_config.json",
        ),
        (
            ["--train", "--rebuild-masters"],
            "--rebuild-masters must come with --fine-tune-type full",
        ),
        (["--train", "--config", "absent.yaml"], "'absent.yaml' must be a readable YAML file"),
        (["--trainn"], "unrecognized arguments: --trainn"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*_flags(folder, data), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["a: [", "- 1", "iterz: 3", "iters: many", "report_to: swanlab"])
def test_a_wrong_file_is_reported_by_the_command(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    config = tmp_path / "lora.yaml"
    config.write_text(text)
    assert main([*_flags(folder, data), "--train", "--config", str(config)]) == 2
    assert capsys.readouterr().err.startswith("error: [lora] ")


def test_a_folder_that_cannot_be_written_is_named_before_the_model_loads(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = data / "train.jsonl/run"
    assert main([*_flags(folder, data), "--train", "--adapter-path", str(run)]) == 2
    captured = capsys.readouterr()
    assert f"'{run}' cannot be written: Not a directory" in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_a_state_that_was_never_saved_is_not_spoken_of(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*QUICK, "--train", "--learning-rate", "1e30", "--save-every", "50"]
    assert main([*_flags(folder, data), *options]) == 2
    assert "nothing had been saved yet. Lower --learning-rate" in capsys.readouterr().err


def test_wandb_that_is_missing_is_named(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main([*_flags(folder, data), "--train", "--report-to", "wandb"]) == 2
    assert "pip install wandb" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "test"])
def test_data_without_the_split_is_named(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (data / f"{name}.jsonl").unlink()
    adapter = ["--adapter-path", ""] if name == "test" else []
    assert main([*_flags(folder, data), *adapter, f"--{name}"]) == 2
    assert f"must hold {name}.jsonl or the like" in capsys.readouterr().err


def test_a_missing_test_file_is_named_before_training(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "test.jsonl").unlink()
    assert main([*_flags(folder, data), "--train", "--test"]) == 2
    shown = capsys.readouterr()
    assert "--data must hold test.jsonl or the like for --test" in shown.err
    assert "Training" not in shown.out


@pytest.mark.exhaustive
def test_defaults_are_those_of_mlx_lm() -> None:
    from mlx_lm.lora import CONFIG_DEFAULTS as THEIRS

    from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings

    ours = vars(FineTuneSettings("d"))
    differing = {n for n in ours.keys() & THEIRS.keys() if ours[n] != THEIRS[n]}
    assert differing == {"data", "clear_cache_threshold", "optimizer_config"}
    assert {name: ours[name] for name in THEIRS["lora_parameters"]} == THEIRS["lora_parameters"]


def test_every_flag_is_described() -> None:
    assert all(action.help for action in build_parser()._actions)
