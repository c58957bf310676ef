"""Trained models are used: masks are filled, texts sorted and turned into others."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from mlx_mmfree.cli.classify import main as classify_main
from mlx_mmfree.cli.fill import main as fill_main
from mlx_mmfree.cli.translate import main as translate_main
from mlx_mmfree.errors import TrainingError
from mlx_mmfree.hub import load_tokenizer
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.corpus.vocabulary import tokenizer_folder
from tests.hub.marian_folder import marian_folder

Make = Callable[..., Settings]


def test_each_trained_model_is_used(settings_of: Make, capsys: pytest.CaptureFixture[str]) -> None:
    uses = {
        "masked_lm": (fill_main, ["--text", "the [MASK] sat.", "--json"]),
        "classifier": (classify_main, ["--text", "the cat sat", "--json"]),
        "encoder_decoder": (
            translate_main,
            ["--text", "the cat sat", "--num-beams", "2", "--json"],
        ),
    }
    found = {}
    for task, (main, flags) in uses.items():
        settings = settings_of(task, {"linear_class": "ternary"}, output=task)
        train_model(settings)
        folder = settings.root / task
        assert (folder / "masters/model.safetensors").exists()
        assert main(["--model", str(folder / "model"), *flags]) == 0
        found[task] = json.loads(capsys.readouterr().out)
    [words] = found["masked_lm"]["masks"]
    assert len(words) == 5
    [text] = found["classifier"]["texts"]
    assert {entry["label"] for entry in text["classes"]} == {"none", "pet"}
    [pair] = found["encoder_decoder"]["translations"]
    assert pair["text"] == "the cat sat"


@pytest.mark.exhaustive
def test_texts_with_a_token_that_the_model_lacks_are_refused(
    settings_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer may have more tokens than the model; so may the data of a further training."""
    uses = {
        "masked_lm": (fill_main, "the [MASK] <more>"),
        "classifier": (classify_main, "the <more>"),
        "encoder_decoder": (translate_main, "the <more>"),
    }
    for task, (main, text) in uses.items():
        settings = settings_of(task, output=task)
        train_model(settings)
        folder = settings.root / task / "model"
        vocabulary = json.loads((folder / "tokenizer.json").read_text())
        own, rows = vocabulary["added_tokens"], json.loads((folder / "config.json").read_text())
        own.append({**own[-1], "id": rows["vocab_size"], "content": "<more>"})
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
        capsys.readouterr()
        without = text.replace(" <more>", " cat")
        assert main(["--model", str(folder), "--text", without]) == 0
        assert main(["--model", str(folder), "--text", text]) == 2
        error = capsys.readouterr().err
        assert "must lie within the model's vocabulary" in error and error.count("\n") == 1
        further = replace(settings, model={}, init_from=f"{task}/model", output=f"{task}2")
        train_model(further)
        if task != "masked_lm":
            name = next(iter(settings.stages[0].weights))
            with (settings.root / name).open("a") as file:
                line = json.dumps({"text": text, "label": "pet"})
                file.write("\n" + (line if name.endswith("jsonl") else f"{text}\t{text}"))
            with pytest.raises(TrainingError, match=r"line 41: .* within the model's vocabulary"):
                train_model(replace(further, output=f"{task}3"))


def test_the_mask_takes_the_space_before_it(settings_of: Make) -> None:
    settings = settings_of("masked_lm")
    folder = tokenizer_folder(settings, 280, is_resumed=False, mask_token="[MASK]")
    tokenizer = load_tokenizer(folder)
    left_out = tokenizer.encode("the [MASK] sat", parse_special=True)
    whole = tokenizer.encode("the cat sat")
    index = left_out.index(tokenizer.mask_token_id)
    assert left_out[:index] == whole[:index]
    assert left_out[index + 1 :] == tokenizer.encode(" sat")


def test_a_published_kind_of_translator_is_trained_further(
    settings_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = settings_of("encoder_decoder")
    marian_folder(plain.root / "marian")
    settings = replace(plain, model={}, init_from="marian", sequence_length=64, learning_rate=1e-4)
    train_model(settings)
    folder = str(settings.root / "run/model")
    assert translate_main(["--model", folder, "--text", "the cat", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out


def test_texts_longer_than_the_model_are_refused(
    settings_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "the cat " * 30
    uses = {
        "masked_lm": (fill_main, ["--text", f"{long} [MASK]"]),
        "classifier": (classify_main, ["--text", long]),
        "encoder_decoder": (translate_main, ["--text", long, "--max-tokens", "4"]),
    }
    for task, (main, flags) in uses.items():
        bounded = {"positions": "learned", "max_position_embeddings": 20}
        settings = settings_of(task, bounded, output=task, sequence_length=20, steps=3)
        train_model(settings)
        capsys.readouterr()
        assert main(["--model", str(settings.root / task / "model"), *flags]) == 2
        assert "must have at most 20 tokens, as many as the model was made for" in (
            capsys.readouterr().err
        )
    flags = ["--model", str(settings.root / "encoder_decoder/model"), "--text", "the cat"]
    assert translate_main([*flags, "--max-tokens", "21"]) == 2
