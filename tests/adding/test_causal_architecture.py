"""A causal architecture is one file: the library loads, writes, converts, trains and runs its models."""

import json
import random
import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.hub import load, load_model, save_model
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.models import Decoder, find, known_model_types
from tests.hub.checkpoints import GOLDENS

TOKENS = mx.array([[1, 7, 3, 39, 0]])


@pytest.fixture(scope="module")
def model(added: None) -> Decoder:
    architecture = find("two_gates")
    mx.random.seed(0)
    made: Decoder = architecture.build(architecture.config.from_hub(architecture.tiny))
    return made


@pytest.fixture(scope="module")
def folder(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint, with float masters."""
    folder = tmp_path_factory.mktemp("two_gates") / "model"
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


def test_it_is_known() -> None:
    assert "two_gates" in known_model_types()


def test_it_is_loaded_and_packed(model: Decoder, folder: Path) -> None:
    want = model(TOKENS)[0]
    assert mx.array_equal(load_model(folder, packed=False)(TOKENS)[0], want)
    packed, tokenizer = load(folder)
    assert sum(isinstance(module, PackedBitLinear) for module in packed.modules()) == 14
    assert mx.allclose(packed(TOKENS)[0], want, atol=1e-4)
    assert tokenizer.encode("The dog")


def test_it_is_written_packed(folder: Path, tmp_path: Path) -> None:
    packed = load_model(folder)
    save_model(tmp_path / "packed", packed)
    assert mx.array_equal(load_model(tmp_path / "packed")(TOKENS)[0], packed(TOKENS)[0])


def test_it_generates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(folder), "-p", "The dog", "-m", "5"]) == 0
    assert capsys.readouterr().out.strip()


def test_it_is_converted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mlx"
    assert main(["convert", "--model", str(folder), "--mlx-path", str(target)]) == 0
    assert re.search("mlx-lm +no: it has no such architecture", capsys.readouterr().out)
    want = load_model(folder)(TOKENS)[0]
    assert mx.allclose(load_model(target)(TOKENS)[0], want, atol=1e-4)


def test_formats_that_have_no_word_for_it_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for format, why in (("gguf", "which this library does not write as GGUF"), ("hf", "keep")):
        flags = ["--mlx-path", str(tmp_path / format), "--to", format]
        assert main(["convert", "--model", str(folder), *flags]) == 2
        shown = capsys.readouterr().err
        assert why in shown and "two_gates" in shown
        assert not (tmp_path / format).exists()


def test_it_is_fine_tuned_with_lora(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"The number {n} is {n}."}) for n in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    adapter = tmp_path / "adapter"
    flags = ["--data", str(tmp_path), "--iters", "2", "--batch-size", "2"]
    flags += ["--adapter-path", str(adapter), "--learning-rate", "1e-2"]
    assert main(["lora", "--model", str(folder), "--train", *flags]) == 0
    capsys.readouterr()
    flags = ["--adapter-path", str(adapter), "-p", "The number", "-m", "3"]
    assert main(["generate", "--model", str(folder), *flags]) == 0
    assert capsys.readouterr().out.strip()


def test_a_model_of_it_is_trained_from_scratch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The dog sees the cat. " * 200)
    (tmp_path / "train.yaml").write_text(
        "output: run\nmodel: {model_type: two_gates, vocab_size: 300, width: 32, depth: 1}\n"
        "stages: [{until: 1.0, weights: {text.txt: 1}}]\nsequence_length: 16\nbatch_size: 2\n"
        "steps: 2\nwarmup_steps: 0\n"
    )
    assert main(["train", "--config", str(tmp_path / "train.yaml")]) == 0, capsys.readouterr().err
    assert load_model(tmp_path / "run" / "model")(TOKENS)[0].shape == (1, 5, 300)


def test_hostile_descriptions_end_in_one_line(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    values = [None, -1, 0, 2**40, 1.5, "x", [], {}, True, 10**30]
    tiny = dict(find("two_gates").tiny)
    for number in range(60):
        case = tmp_path / str(number)
        case.mkdir()
        changed = tiny | {"model_type": "two_gates", rng.choice(list(tiny)): rng.choice(values)}
        (case / "config.json").write_text(json.dumps(changed))
        (case / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        with pytest.raises(MMFreeError):
            load_model(case)
