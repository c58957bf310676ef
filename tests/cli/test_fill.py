"""`mmfree fill` with a tiny encoder of random weights."""

import json

import mlx.core as mx
import pytest

from mlx_mmfree import demo, load
from mlx_mmfree.cli.fill import main
from tests.hub.encoder_folder import MASK, encoder_folder

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(encoder_folder(tmp_path_factory.mktemp("encoder") / "model"))


def test_each_mask_gets_words(model: str, capsys: Captured) -> None:
    text = f"The {MASK} sat on a {MASK}."
    assert main(["--model", model, "--text", text, "--top-k", "3", "--json"]) == 0
    masks = json.loads(capsys.readouterr().out)["masks"]
    assert [len(words) for words in masks] == [3, 3]
    own, tokenizer = load(model)
    ids = tokenizer.encode(text, parse_special=True)
    positions = [n for n, token in enumerate(ids) if token == tokenizer.mask_token_id]
    probabilities = mx.softmax(own(mx.array([ids]))[0].astype(mx.float32), axis=-1)
    for position, words in zip(positions, masks, strict=True):
        best = sorted(probabilities[position].tolist(), reverse=True)[:3]
        assert [word["probability"] for word in words] == pytest.approx(best, rel=1e-4)
    assert main(["--model", model, "--text", text, "--top-k", "3"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["mask", "word", "probability"]
    assert [line.split()[0] for line in lines] == ["1"] * 3 + ["2"] * 3


def test_mistakes(model: str, capsys: Captured) -> None:
    for flags, message in (
        (["--model", model, "--text", "no mask"], "--text must hold '"),
        (["--model", str(demo.path()), "--text", "a"], "--model must fill in masked tokens but"),
    ):
        assert main(flags) == 2
        assert message in capsys.readouterr().err
