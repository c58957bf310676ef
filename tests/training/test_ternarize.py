"""Dense models that become ternary, with themselves as teachers: the run, the command, what opens it."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree import generate, load
from mlx_mmfree.cli import main
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.ternary.groups import TernaryScheme, make_ternary
from mlx_mmfree.models import Decoder, find
from tests.hub.checkpoints import GOLDENS
from tests.tolerances import TOLERANCE, relative_error

TEXT = "The dog sees the cat. A number is a number. "


def dense_model(name: str = "qwen3", **sizes: int) -> Decoder:
    record = find(name)
    given = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 32,
        "vocab_size": 520,
        **sizes,
    }
    mx.random.seed(1)
    config = record.config.from_hub({**record.tiny, **given, "initializer_range": 0.1})
    model: Decoder = record.build(config)
    return model


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    save_model(tmp_path / "dense", dense_model(), GOLDENS / "tokenizer_bpe")
    (tmp_path / "train.txt").write_text(TEXT * 60)
    (tmp_path / "valid.txt").write_text(TEXT * 20)
    return tmp_path / "dense"


def flags_of(dense: Path, *more: str) -> list[str]:
    folder = dense.parent
    flags = ["ternarize", "--model", str(dense), "--output", str(folder / "run")]
    flags += ["--data", str(folder / "train.txt"), "--valid", str(folder / "valid.txt")]
    flags += ["--steps", "6", "--sequence-length", "16", "--batch-size", "2"]
    return [*flags, *more]


def test_the_command(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags_of(dense)) == 0
    assert "all weights, by the teacher" in capsys.readouterr().out
    run = dense.parent / "run"
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["quantization"] == {"group_size": 64, "bits": 2, "mode": "affine"}
    model, masters = load_model(run / "model"), load_model(run / "masters")
    blocks = [matrix for block in model.blocks for matrix in matrices(block).values()]
    assert len(blocks) == 14 and all(matrix.is_packed for matrix in blocks)
    # the model is what its masters become, and adds no tensor to what the dense one has
    for block in masters.blocks:
        make_ternary(block, TernaryScheme(threshold=0.7, keeps_mean=False))
    tokens = mx.array([[1, 5, 9, 2]])
    assert mx.allclose(model(tokens)[0], masters(tokens)[0], atol=1e-4)
    assert isinstance(masters.embed, nn.Embedding)
    assert not any(
        "norm" in name
        for name in set(config) - set(json.loads((dense / "config.json").read_text()))
    )
    card = (run / "model" / "README.md").read_text()
    assert "mmfree ternarize" in card and "ternary" in card


@pytest.mark.exhaustive
def test_its_gguf_has_the_same_text(dense: Path) -> None:
    assert main(flags_of(dense)) == 0
    folder = dense.parent
    flags = ["--model", str(folder / "run/model"), "--to", "gguf", "--gguf-type", "q2_0"]
    assert main(["convert", *flags, "--output", str(folder / "gguf")]) == 0
    (file,) = (folder / "gguf").glob("*.gguf")
    texts = [
        generate(*load(source, dtype=mx.float32), "The dog", max_tokens=12)
        for source in (folder / "run/model", file)
    ]
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
def test_a_rotated_model_opens_here(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags_of(dense, "--rotation", "32")) == 0
    run = dense.parent / "run"
    model, masters = load_model(run / "model", dtype=mx.float32), load_model(run / "masters")
    blocks = [matrix for block in model.blocks for matrix in matrices(block).values()]
    assert len(blocks) == 14 and all(matrix.is_rotated for matrix in blocks)
    for block in masters.blocks:
        make_ternary(block, TernaryScheme(threshold=0.7, keeps_mean=False, block=32))
    tokens = mx.array([[1, 5, 9, 2]])
    wanted = masters(tokens)[0]
    assert relative_error(model(tokens)[0], wanted) <= TOLERANCE[mx.float16]
    card = (run / "model" / "README.md").read_text()
    assert "it reads rotated weights of Qwen3.5 alone" in card
    # other programs open it without its rotation
    flags = ["convert", "--model", str(run / "model")]
    for to in ("mlx", "gguf"):
        assert main([*flags, "--to", to, "--output", str(dense.parent / f"no-{to}")]) == 2
        assert "[convert]" in capsys.readouterr().err
    target = dense.parent / "plain"
    assert main([*flags, "--unrotate", "--output", str(target)]) == 0
    plain = load_model(target, dtype=mx.float32)
    assert not any(matrix.is_packed for matrix in matrices(plain.blocks[0]).values())
    assert relative_error(plain(tokens)[0], wanted) <= TOLERANCE[mx.float16]


@pytest.mark.exhaustive
def test_a_minicpm_becomes_ternary(dense: Path) -> None:
    save_model(dense, dense_model("minicpm"), GOLDENS / "tokenizer_bpe", overwrite=True)
    assert main(flags_of(dense, "--rotation", "32")) == 0
    run = dense.parent / "run"
    model, masters = load_model(run / "model", dtype=mx.float32), load_model(run / "masters")
    for block in masters.blocks:
        make_ternary(block, TernaryScheme(threshold=0.7, keeps_mean=False, block=32))
    tokens = mx.array([[1, 5, 9, 2]])
    assert relative_error(model(tokens)[0], masters(tokens)[0]) <= TOLERANCE[mx.float16]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scales", "bitnet", "--threshold", "0.5"], "--threshold must be left out where"),
        (["--inner-norms"], "--inner-norms must be left out unless"),
        (["--steps", "0"], "[ternarize] --steps or --text-steps must be positive"),
        (["--scales", "bitnet", "--rotation", "32"], "--rotation must be left out where"),
        (["--rotation", "48"], "--rotation must be 0, or a power of two from 2 to 8192 but got 48"),
        (["--rotation", "128"], "--rotation must be another for this model but got 128"),
        (["--threshold", "9"], "--threshold must be from 0 to 4 but got 9.0"),
    ],
)
def test_choices_that_do_not_fit(
    dense: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags_of(dense, *flags)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags",
    [
        ("--threshold", "0.5"),
        ("--no-scale-of-kept",),
        ("--scales", "row"),
        ("--rotation", "32"),
        ("--teacher-weight", "2"),
        ("--keep-embedding",),
    ],
)
def test_a_run_goes_on_with_its_own_settings_alone(
    dense: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags_of(dense, "--steps", "1")) == 0
    weights = (dense.parent / "run/model/model.safetensors").read_bytes()
    assert main(flags_of(dense, "--steps", "1", *flags)) == 2
    name = flags[0].removeprefix("--").removeprefix("no-").replace("-", "_")
    assert f"holds a run with other values of {name}" in capsys.readouterr().err
    assert (dense.parent / "run/model/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("line", ["to: [mlgru]", "ternary: false"])
def test_another_format_than_that_of_the_command_is_refused(
    dense: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = dense.parent / "run.yaml"
    file.write_text(f"{line}\nscales: bitnet\n")
    assert main(flags_of(dense, "--config", str(file), "--dry-run")) == 2
    assert "must be left out, as attention stays" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_distil_with_its_defaults_is_the_same_run(
    dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["--threshold", "0.7", "--scale-of-kept", "--quantization-warmup", "0"]
    same += ["--teacher-weight", "4", "--final-learning-rate", "0"]
    command, *flags = flags_of(dense, "--steps", "2", *same)
    of_distil = ["--logits-steps" if flag == "--steps" else flag for flag in flags]
    assert main(flags_of(dense, "--steps", "2")) == 0
    assert "note:" not in capsys.readouterr().err
    # the flags are its defaults
    assert main([command, *flags]) == 0
    other = ["--output", str(dense.parent / "other"), "--to", "same", "--ternary"]
    assert main(["distil", *of_distil, *other, "--scales", "group"]) == 0
    assert "`mmfree ternarize --scales group` is made for this" in capsys.readouterr().err
    for name in ("model", "masters"):
        files = (dense.parent / run / name / "model.safetensors" for run in ("run", "other"))
        assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.exhaustive
def test_cached_logits_are_compared(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are rounded to 16 bits, so that a run with them is another one."""
    flags = ("--steps", "1", "--teacher-top-k", "8")
    assert main(flags_of(dense, *flags)) == 0
    assert main(flags_of(dense, *flags, "--cache-logits")) == 2
    assert "holds a run with other values of cache_logits" in capsys.readouterr().err


def test_messages_name_the_command(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = find("hgrn_bit")
    save_model(tmp_path / "other", record.build(record.config.from_hub(record.tiny)))
    (tmp_path / "run.yaml").write_text("keep_layers: [7]")
    other = flags_of(tmp_path / "other")
    for flags, message in (
        (other, "[ternarize] --model must be a transformer of the Llama family"),
        (flags_of(dense, "--config", str(tmp_path / "run.yaml")), "[ternarize] keep_layers must"),
        (flags_of(dense, "--data", "none.txt"), "[ternarize] --data must name files"),
    ):
        assert main(flags) == 2
        assert message in capsys.readouterr().err.replace("'", "")


def test_a_model_that_is_ternary_already(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = find("bitnet")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "vocab_size": 520}
    model = record.build(record.config.from_hub({**record.tiny, **sizes}))
    save_model(tmp_path / "bitnet", model, GOLDENS / "tokenizer_bpe")
    assert main(flags_of(tmp_path / "bitnet")) == 2
    assert "its linears are ternary already" in capsys.readouterr().err


def test_groups_that_do_not_divide_the_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "dense", dense_model(hidden_size=48), GOLDENS / "tokenizer_bpe")
    (tmp_path / "train.txt").write_text(TEXT)
    (tmp_path / "valid.txt").write_text(TEXT)
    assert main(flags_of(tmp_path / "dense")) == 2
    message = (
        "must be bitnet for this model but got 'group': groups of 64 do not divide the 48 inputs"
    )
    assert message in capsys.readouterr().err
