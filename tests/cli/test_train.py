"""`mmfree train` on a tiny corpus, from text files to a model that writes."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import yaml

from mlx_mmfree import load
from mlx_mmfree.cli.train import build_parser, main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import load_model, load_tokenizer
from mlx_mmfree.layers import PackedBitLinear, pack_linears
from mlx_mmfree.layers.dense import Linear
from mlx_mmfree.training.corpus.tokenize import HEADER_BYTES
from mlx_mmfree.training.results import read_log
from mlx_mmfree.training.trainer import Trainer
from tests.hub.checkpoints import GOLDENS
from tests.tolerances import relative_error
from tests.training.conftest import config, here, run_values, without_curve  # noqa: F401

pytestmark = pytest.mark.usefixtures("without_curve")


def test_run_writes_a_model_that_loads(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "best step" in out and "valid/bits_per_byte" in out
    run = config.parent / "run"
    model, tokenizer = load(run / "model")
    assert model.vocab_size == 300
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert main(["--config", str(config)]) == 0


def test_dry_run_prints_the_plan_and_writes_nothing(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--dtype", "bfloat16", "--optimizer", "adamw8bit", "--dry-run"]
    assert main(["--config", str(config), *flags]) == 0
    note, plan = capsys.readouterr().out.splitlines()
    assert note.startswith("The run computes in float32, because CPUs are slow at bfloat16.")
    assert plan.startswith("Planned memory on cpu: ") and "moments" in plan
    assert not (config.parent / "run").exists()


@pytest.mark.usefixtures("here")
def test_a_model_beyond_all_memory_is_refused_before_anything_is_written(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = yaml.safe_load(config.read_text())
    _change(config, model=values["model"] | {"hidden_size": 4096, "intermediate_size": 1_048_576})
    assert main(["--config", str(config)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "whose largest number is 'intermediate_size', 1,048,576: lower it" in printed.err
    assert not (config.parent / values["output"]).exists()
    # a plan alone takes none
    assert main(["--config", str(config), "--dry-run"]) == 0
    assert "warning: [memory] the run needs" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_dense_linears_by_flag(config: Path) -> None:  # noqa: F811
    assert main(["--config", str(config), "--linear-class", "dense", "--output", "dense"]) == 0
    model, _ = load(config.parent / "dense/model")
    assert model.config.linear_class == "dense"


def test_flags_win_over_the_file(config: Path) -> None:  # noqa: F811
    assert main(["--config", str(config), "--steps", "3", "--warmup-steps", "1"]) == 0
    assert (config.parent / "run/log.jsonl").read_text().count('"learning_rate":') == 4


def _change(config: Path, **values: Any) -> None:  # noqa: F811
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | values))


def _vocabulary(config: Path) -> int:  # noqa: F811
    return load_tokenizer(config.parent / "run/tokenizer").vocab_size


def test_the_result_is_named_and_its_masters_load(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--config", str(config)]) == 0
    run = config.parent / "run"
    line = (
        f"Wrote the model to '{run / 'model'}' and its float master weights to '{run / 'masters'}'."
    )
    assert capsys.readouterr().out.splitlines()[-1] == line
    masters = load_model(run / "masters", packed=False)
    packed = load_model(run / "model")
    tokens = mx.array([[5, 6, 7]])
    assert mx.array_equal(pack_linears(masters)(tokens)[0], packed(tokens)[0])
    with pytest.raises(CheckpointError, match=r"packed from, '.*run/masters', or pass rebuild"):
        load_model(run / "model", packed=False)


def test_a_start_with_other_settings_makes_its_own_tokenizer(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = yaml.safe_load(config.read_text())["model"]
    _change(config, model=model | {"vocab_size": 100})
    assert main(["--config", str(config)]) == 2
    assert (
        "'vocab_size' must cover the tokenizer's 257 tokens but got 100" in capsys.readouterr().err
    )
    _change(config, model=model)
    assert main(["--config", str(config), "--steps", "3"]) == 0
    assert _vocabulary(config) == 300


def test_texts_that_changed_are_noticed(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = config.parent / "train.txt", config.parent / "more.txt"
    assert main(["--config", str(config)]) == 0
    before = (config.parent / "run/tokenizer/tokenizer.json").read_bytes()
    for text in texts:
        original = text.read_text()
        text.write_text(original.replace("cat", "whale"))
        assert main(["--config", str(config)]) == 2
        assert "holds a run with other values of texts" in capsys.readouterr().err
        text.write_text(original)
    assert (config.parent / "run/tokenizer/tokenizer.json").read_bytes() == before
    shutil.rmtree(config.parent / "run/checkpoint")
    texts[0].write_text(texts[0].read_text().replace("cat", "whale"))
    assert main(["--config", str(config)]) == 0
    assert (config.parent / "run/tokenizer/tokenizer.json").read_bytes() != before


@pytest.mark.usefixtures("here")
def test_a_run_begins_with_the_weights_of_another(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = config.parent / "run"
    assert main(["--config", str(config), "--steps", "3"]) == 0
    _change(config, model={})
    flags = ["--config", str(config), "--output", "second", "--steps", "2", "--warmup-steps", "0"]
    flags += ["--learning-rate", "1e-9", "--weight-decay", "0"]
    assert main([*flags, "--init-from", "run/masters"]) == 0
    first, second = (load_model(path / "model") for path in (run, config.parent / "second"))
    tokens = mx.array([[5, 6, 7]])
    assert relative_error(second(tokens)[0], first(tokens)[0]) <= 1e-3
    assert not (config.parent / "second/tokenizer").exists()
    capsys.readouterr()
    flags[flags.index("second")] = "third"
    assert main([*flags, "--init-from", "run/model"]) == 2
    assert "run/masters', or pass" in capsys.readouterr().err
    assert main([*flags, "--init-from", "run/model", "--rebuild-masters"]) == 0
    third = load_model(config.parent / "third/model")
    assert relative_error(third(tokens)[0], first(tokens)[0]) <= 1e-3


@pytest.mark.usefixtures("here")
def test_masters_that_do_not_say_so_need_an_answer(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    described = LLAMA | {"quantization_config": ONLINE}
    _change(config, model=described)
    assert main(["--config", str(config), "--steps", "3"]) == 0
    file = config.parent / "run/masters/config.json"
    file.write_text(file.read_text().replace('"online"', '"offline"'))
    _change(config, model={})
    flags = ["--config", str(config), "--steps", "3", "--init-from", "run/masters"]
    assert main([*flags, "--output", "second"]) == 2
    assert "--latent must be given for this checkpoint" in capsys.readouterr().err
    assert main([*flags, "--output", "second", "--latent"]) == 0
    assert (config.parent / "second/masters").exists()


LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}
ONLINE = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["ternary", "dense"])
@pytest.mark.parametrize(
    "described", [{}, {"quantization_config": ONLINE}], ids=["dense", "ternary"]
)
def test_linears_of_a_llama_are_what_is_asked_for(
    config: Path,  # noqa: F811
    kind: str,
    described: dict[str, Any],
) -> None:
    _change(config, model=LLAMA | described)
    assert main(["--config", str(config), "--linear-class", kind, "--steps", "3"]) == 0
    model = load_model(config.parent / "run/model")
    packed = {"ternary": PackedBitLinear, "dense": Linear}[kind]
    assert type(model.blocks[0].token_mixer.output_proj) is packed
    assert (config.parent / "run/masters").exists() is (kind == "ternary")


def test_linears_that_an_architecture_has_not_are_refused(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    _change(
        config,
        model=LLAMA | {"model_type": "bitnet", "rope_theta": 500000.0, "num_key_value_heads": 2},
    )
    assert main(["--config", str(config), "--linear-class", "dense"]) == 2
    wanted = "--linear-class must be ternary for 'model_type' 'bitnet' but got 'dense'"
    assert wanted in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_a_tokenizer_without_an_end_of_documents_is_refused(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = config.parent / "tokenizer"
    shutil.copytree(GOLDENS / "tokenizer_bpe", folder)
    _change(config, tokenizer="tokenizer", model=LLAMA | {"vocab_size": 518})
    assert main(["--config", str(config), "--steps", "3"]) == 0
    file = folder / "tokenizer_config.json"
    config_of_tokenizer = json.loads(file.read_text())
    del config_of_tokenizer["eos_token"]
    file.write_text(json.dumps(config_of_tokenizer))
    assert main(["--config", str(config), "--output", "second"]) == 2
    shown = capsys.readouterr().err
    assert "must have the token <|endoftext|> or a token for the end of a text" in shown


def test_a_run_ends_when_nothing_gets_better(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--steps", "40", "--steps-per-eval", "1", "--patience", "2", "--learning-rate", "1"]
    assert main(["--config", str(config), *flags]) == 0
    log = read_log(config.parent / "run/log.jsonl")
    losses = [record["valid_loss"] for record in log if "valid_loss" in record]
    assert len(losses) < 40 and min(losses) == losses[-3]
    end = f"The run ends after step {log[-1]['step']} of 40: 2 validations in a row gave no better loss"
    assert end in capsys.readouterr().err


def test_without_held_out_text_the_last_weights_are_kept(config: Path) -> None:  # noqa: F811
    _change(config, valid=[])
    assert main(["--config", str(config)]) == 0
    run = config.parent / "run"
    last = mx.load(str(run / "checkpoint/model.safetensors"))
    best = mx.load(str(run / "best.safetensors"))
    assert all(mx.array_equal(best[name], value) for name, value in last.items())


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def log(record: Any, step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    ended = []
    run = SimpleNamespace(log=log, finish=lambda: ended.append(True))
    module = SimpleNamespace(init=lambda **options: run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert main(["--config", str(config), "--report-to", "wandb"]) == 130
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "[training] SIGINT stopped the run after step 2 of 6; its state is kept in"
    )
    assert error.endswith("Repeat the command to go on from there.")
    assert ended
    assert main(["--config", str(config)]) == 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps must be positive but got 0"),
        (["--stepz", "3"], "unrecognized arguments: --stepz"),
        (["--learning-rate", "fast"], "invalid float value"),
        (["--patience", "-1"], "--patience must be at least 0 but got -1"),
        (["--process-timeout-s", "0"], "--process-timeout-s must be positive but got 0.0"),
        (["--report-to", "swanlab"], "--report-to must be wandb or tensorboard but got 'swanlab'"),
        (["--init-from", "x"], "--init-from must come without 'model' and --tokenizer"),
        (["--output", "train.txt/run"], "train.txt/run' cannot be written: Not a directory"),
    ],
)
def test_mistakes_are_one_line(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    assert main(["--config", str(config), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml' must be a readable YAML file" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"stages": [{"until": 1, "weights": {"trian.txt": 1}}]},
            "'stages' must name files that can",
        ),
        ({"valid": ["vaild.txt"]}, "'valid' must name files that can be read but"),
        ({"valid": ["."]}, "it is a folder, not a regular file. Correct its name"),
        ({"tokenizer": "tokeniser"}, "'tokenizer' must be the folder of a tokenizer but got"),
        ({"valid": ["valid.jsonl"]}, "must be a text file or a token file. Make one of it"),
        ({"valid": ["damaged.tokens"]}, "damaged.tokens' must be a token file"),
        (
            {"stages": [{"until": 1, "weights": {"empty.txt": 1}}]},
            "empty.txt' is empty. Put texts into it",
        ),
    ],
    ids=str,
)
def test_files_that_are_not_there_are_named_before_anything_is_done(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    message: str,
    flags: list[str],
) -> None:
    for name in ("valid.jsonl", "damaged.tokens", "empty.txt"):
        (config.parent / name).touch()
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | change))
    assert main(["--config", str(config), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize("name", ["init_from", "teacher"])
@pytest.mark.parametrize("by_flag", [True, False])
def test_a_missing_model_is_reported_by_its_setting(
    config: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    name: str,
    by_flag: bool,
) -> None:
    settings = yaml.safe_load(config.read_text())
    if name == "init_from":
        del settings["model"]
        settings.pop("tokenizer", None)
    if not by_flag:
        settings[name] = "x"
    config.write_text(yaml.safe_dump(settings))
    flag = f"--{name.replace('_', '-')}"
    assert main(["--config", str(config), *([flag, "x"] if by_flag else [])]) == 2
    error = capsys.readouterr().err
    shown = flag if by_flag else f"'{name}'"
    assert f"{shown} must be an existing folder or a Hub repository 'owner/name'" in error
    assert "'x'" in error
    assert error.count("\n") == 1


def test_every_flag_is_described() -> None:
    assert all(action.help for action in build_parser()._actions)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["train", "valid"])
@pytest.mark.parametrize("size", [4100, None], ids=["shorter", "other ids"])
def test_token_files_that_change_are_named(
    config: Path,  # noqa: F811
    name: str,
    size: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = yaml.safe_load(config.read_text())
    del values["model"]["vocab_size"]
    assert main(["--config", str(config), "--output", "first"]) == 0
    tokens = config.parent / "first" / "tokens"
    by_size = sorted(tokens.iterdir(), key=lambda file: file.stat().st_size)
    chosen = {"valid": by_size[0], "train": by_size[-1]}
    values |= {
        "model": {**values["model"], "vocab_size": 300},
        "tokenizer": "first/tokenizer",
        "stages": [{"until": 1, "weights": {str(chosen["train"]): 1}}],
        "valid": [str(chosen["valid"])],
    }
    config.write_text(yaml.safe_dump(values))

    def save(trainer: Trainer) -> None:
        with chosen[name].open("r+b") as stream:
            if size is None:
                stream.seek(HEADER_BYTES)
                stream.write(b"\xff\x00" * 20)
            else:
                stream.truncate(size)

    monkeypatch.setattr(Trainer, "_save", save)
    capsys.readouterr()
    assert main(["--config", str(config)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"'{chosen[name]}' must stay as it is while it is read, but was changed" in error
