"""Embeddings: which tokens give the vector of a text, prompts, batches, and what is refused."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import demo, embed, embed_tokens, load
from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.generation.embeddings import batches_by_length, embedding_steps
from mlx_mmfree.hub import Tokenizer
from tests.hub.embedder_folder import embedder_folder
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
TEXTS = ["The queen gave a robe.", "No.", "He wore it, and so on, and on.", "No frog."]
Loaded = tuple[Any, Tokenizer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedder") / "model"
    return embedder_folder(path, pooling="mean_tokens", default_prompt="document")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load(folder, dtype=mx.float32)


def alone(model: Any, tokenizer: Tokenizer, text: str, pooling: str) -> np.ndarray:
    """The vector by its definition, of a text that is read by itself."""
    hidden = np.asarray(model(mx.array([tokenizer.encode(text)]))[0][0], np.float64)
    chosen = {"first": hidden[0], "last": hidden[-1], "mean": hidden.mean(axis=0)}[pooling]
    return chosen / np.linalg.norm(chosen)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_texts_that_are_read_together_are_as_if_alone(loaded: Loaded, pooling: Any) -> None:
    model, tokenizer = loaded
    done: list[int] = []
    got = embed(model, tokenizer, TEXTS, pooling=pooling, progress=done.append)
    assert got.dtype == mx.float32 and done[-1] == len(TEXTS)
    want = [alone(model, tokenizer, text, pooling) for text in TEXTS]
    assert relative_error(got, mx.array(np.array(want, np.float32))) <= FLOAT32


def test_long_texts_are_read_in_chunks(loaded: Loaded) -> None:
    model, tokenizer = loaded
    ids = [tokenizer.encode(" ".join(TEXTS)), tokenizer.encode(TEXTS[1])]
    for pooling in ("first", "last", "mean"):
        steps = embedding_steps(model, ids, pooling, step_size=4)
        counted = []
        while True:
            try:
                counted.append(next(steps))
            except StopIteration as end:
                got = end.value
                break
        assert len(counted) == -(-len(ids[0]) // 4) + -(-len(ids[1]) // 4)
        whole = embed(model, tokenizer, [" ".join(TEXTS), TEXTS[1]], pooling=pooling)
        assert relative_error(mx.array(got), whole) <= FLOAT32


def test_the_last_token_is_the_one_that_the_files_ask_for(loaded: Loaded) -> None:
    _, tokenizer = loaded
    assert tokenizer.encode("a")[-1] == tokenizer.eos_token_id


def test_files_say_pooling_and_prompts(folder: Path, loaded: Loaded) -> None:
    model, tokenizer = loaded
    assert model.embedding.pooling == "mean" and model.embedding.default_prompt == "document"
    got = embed(model, tokenizer, TEXTS[:1], prompt_name="query")
    want = alone(model, tokenizer, f"Find what answers: {TEXTS[0]}", "mean")
    assert relative_error(got[0], mx.array(want.astype(np.float32))) <= FLOAT32
    plain = embed(model, tokenizer, TEXTS[:1])
    assert relative_error(got, plain) > 100 * FLOAT32
    with pytest.raises(
        ValueError, match="must be one of the model's prompts \\('query', 'document'\\)"
    ):
        embed(model, tokenizer, TEXTS, prompt_name="passage")


def test_batches_are_of_like_lengths() -> None:
    lengths = [5, 1, 9, 8, 30, 1, 5]
    batches = batches_by_length(lengths, 20)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert batches == [[4], [2, 3], [0, 6], [1, 5]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"texts": []}, "'texts' must hold a text but holds none"),
        ({"texts": "a text"}, "'texts' must be a list of texts"),
        ({"texts": None}, "'texts' must be a list of texts"),
        ({"texts": (text for text in ["a"])}, "'texts' must be a list of texts"),
        ({"texts": ["a", [5]]}, r"number 1 is \[5\]\. embed_tokens takes ids"),
        ({"texts": ["a", ""]}, "must hold no empty text but number 1 is one"),
        ({"texts": ["a"], "pooling": "max"}, "'pooling' must be one of 'first', 'last', 'mean'"),
    ],
)
def test_refused(loaded: Loaded, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        embed(*loaded, **arguments)


def test_masks_that_are_refused(loaded: Loaded) -> None:
    tokens = mx.array([[5, 6], [7, 8]])
    with pytest.raises(ValueError, match=r"one shape \(texts, length\)"):
        embed_tokens(loaded[0], tokens, mx.ones((2, 3)))
    with pytest.raises(ValueError, match="text 1 must hold a token but holds none"):
        embed_tokens(loaded[0], tokens, mx.array([[1, 1], [0, 0]]))


def test_too_long_texts_are_named(tmp_path: Path) -> None:
    model, tokenizer = load(embedder_folder(tmp_path / "m", max_length=6))
    assert model.embedding.pooling == "last"
    with pytest.raises(ValueError, match=r"at most 6 tokens.*Shorten it"):
        embed(model, tokenizer, [" ".join(TEXTS)])


def test_a_model_that_writes_texts_gives_means() -> None:
    model, tokenizer = load(demo.path(), dtype=mx.float32)
    hidden = np.asarray(model.hidden(mx.array([tokenizer.encode("the cat")]))[0][0])
    want = hidden.mean(axis=0) / np.linalg.norm(hidden.mean(axis=0))
    got = embed(model, tokenizer, ["the cat"])
    assert relative_error(got, mx.array(want)[None]) <= FLOAT32


@pytest.mark.parametrize(
    ("file", "content", "error", "words"),
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            UnsupportedModelError,
            "max_tok",
        ),
        ("1_Pooling/config.json", {}, UnsupportedModelError, "sets none"),
        (
            "modules.json",
            [{"type": "a.models.Dense"}],
            UnsupportedModelError,
            "no other steps than",
        ),
        ("modules.json", {"type": "Pooling"}, UnsupportedModelError, "no other steps than"),
        (
            "config_sentence_transformers.json",
            {"prompts": ["a"]},
            CheckpointError,
            "must hold texts",
        ),
        (
            "config_sentence_transformers.json",
            {"prompts": {"a": "b"}, "default_prompt_name": "c"},
            CheckpointError,
            "the name of one of them",
        ),
        ("sentence_bert_config.json", {"max_seq_length": 0}, CheckpointError, "max_seq_length"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, file: str, content: Any, error: type[Exception], words: str
) -> None:
    folder = embedder_folder(tmp_path / "m", pooling="lasttoken")
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(error, match=words):
        load(folder)
