"""Marian beside transformers: the same tokens, by greedy and by beam search."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.generation.translation import translate
from mlx_mmfree.hub import load, load_model, load_tokenizer, save_model
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from mlx_mmfree.tokenizer.translation_tokenizer import TranslationTokenizer
from tests.hub.marian_folder import SENTENCES, marian_folder
from tests.hub.searching_marian import END, PUBLISHED, SEARCHES, SOURCES, searching_marian

interop = pytest.mark.interop


class Numbers:
    """A tokenizer whose texts are the numbers of their tokens."""

    def encode(self, text: str) -> list[int]:
        return [*map(int, text.split()), END]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("seed", "change", "config", "want"), SEARCHES)
def test_searches_are_those_of_the_files(
    tmp_path: Path, seed: str, change: Any, config: Any, want: list[str]
) -> None:
    generation = None if change is None else PUBLISHED | change
    model: Any = load_model(searching_marian(tmp_path / "model", seed, generation, **config))
    found = translate(model, Numbers(), SOURCES)
    assert found == want
    # what the files say is not lost where the model is written again
    save_model(tmp_path / "again", model)
    assert translate(load_model(tmp_path / "again"), Numbers(), SOURCES) == found  # type: ignore[arg-type]


def test_arguments_go_before_the_files(tmp_path: Path) -> None:
    model: Any = load_model(searching_marian(tmp_path / "model", "c", PUBLISHED))
    by_file = translate(model, Numbers(), SOURCES)
    greedy = translate(model, Numbers(), SOURCES, num_beams=1)
    assert greedy == ["24", "24"] != by_file
    assert translate(model, Numbers(), SOURCES, length_penalty=0.0) == ["", ""]
    assert translate(model, Numbers(), SOURCES, max_tokens=6)[0] == "24 12 24 29 24"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"do_sample": True}, UnsupportedModelError, "must leave out 'do_sample' but give True"),
        ({"num_beam_groups": 2}, UnsupportedModelError, "'num_beam_groups'"),
        (
            {"encoder_no_repeat_ngram_size": 3},
            UnsupportedModelError,
            "'encoder_no_repeat_ngram_size'",
        ),
        (
            {"num_beams": 0},
            CheckpointError,
            "'num_beams' of the model's files must be a whole number",
        ),
        ({"length_penalty": "1"}, CheckpointError, "'length_penalty' .* must be a number from 0"),
        ({"bad_words_ids": [[]]}, CheckpointError, "'bad_words_ids' .* must be a list of lists"),
        ({"bad_words_ids": [[53]]}, CheckpointError, "tokens below 53"),
        ({"eos_token_id": "</s>"}, CheckpointError, "'eos_token_id' .* must be tokens below 53"),
        ({"early_stopping": 1}, CheckpointError, "'early_stopping' .* must be true or false"),
    ],
)
def test_searches_that_are_not_implemented_or_wrong_are_refused_by_name(
    tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    model: Any = load_model(searching_marian(tmp_path / "model", "c", PUBLISHED | change))
    with pytest.raises(error, match=message):
        translate(model, Numbers(), SOURCES)


def test_a_config_keeps_what_nothing_reads(tmp_path: Path) -> None:
    """Keys that the configurations of Helsinki-NLP/opus-mt-* carry, and transformers opens."""
    left = {
        "_name_or_path": "Helsinki-NLP/opus-mt-en-vi",
        "_num_labels": 3,
        "activation_dropout": 0.0,
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "bos_token_id": 0,
        "classif_dropout": 0.0,
        "classifier_dropout": 0.0,
        "decoder_layerdrop": 0.0,
        "do_blenderbot_90_layernorm": False,
        "extra_pos_embeddings": 53685,
        "force_bos_token_to_be_generated": False,
        "gradient_checkpointing": False,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
        "normalize_before": False,
        "normalize_embedding": False,
        "num_hidden_layers": 1,
        "save_step": 7,
        "static_position_embeddings": True,
        "tokenizer_class": "MarianTokenizer",
        "use_cache": True,
    }
    model: Any = load_model(searching_marian(tmp_path / "model", "c", PUBLISHED, **left))
    assert translate(model, Numbers(), SOURCES)[1] == "24 20 5 24 29 24"


def test_load_gives_what_translate_takes(tmp_path: Path) -> None:
    folder = marian_folder(tmp_path / "model")
    model, tokenizer = load(folder)
    assert isinstance(tokenizer, TranslationTokenizer)
    assert type(load_tokenizer(folder)) is TranslationTokenizer
    found = translate(model, tokenizer, SENTENCES)
    assert len(found) == len(SENTENCES)
    save_model(tmp_path / "again", model, tokenizer)
    assert translate(*load(tmp_path / "again"), SENTENCES) == found


def test_a_tokenizer_of_one_vocabulary_ends_the_source(tmp_path: Path) -> None:
    """The tokenizer that `load` gives with an encoder-decoder of one vocabulary does not end a text."""
    model: Any = load_model(searching_marian(tmp_path / "model", "c", PUBLISHED))
    seen: list[list[int]] = []
    encode = model.encode
    model.encode = lambda source, valid=None: (
        seen.append(source.tolist()[0]) or encode(source, valid)
    )
    chunks = ["</s>", *(chr(ord("A") + number) for number in range(52))]
    vocabulary = {chunk: number for number, chunk in enumerate(chunks)}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []}
        )
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    translate(model, Tokenizer.from_folder(tmp_path), ["BC"])
    assert seen == [[2, 3, END]]


@interop
@pytest.mark.filterwarnings("default")
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import MarianTokenizer

    folder = marian_folder(tmp_path / "model")
    ours, theirs = TranslationTokenizer(folder), MarianTokenizer.from_pretrained(folder)
    for text in (*SENTENCES, ">>fra<<the cat", "Ω and a dog", "", "  two  spaces "):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        want = theirs.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
        assert ours.decode(ids) == want


@interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("seed", "change", "config", "want"), SEARCHES)
def test_frozen_searches_are_those_of_transformers(
    tmp_path: Path, seed: str, change: Any, config: Any, want: list[str]
) -> None:
    import torch
    from transformers import MarianMTModel

    generation = None if change is None else PUBLISHED | change
    folder = searching_marian(tmp_path / "model", seed, generation, **config)
    model = MarianMTModel.from_pretrained(folder).eval()
    ends = model.generation_config.eos_token_id
    for source, text in zip(SOURCES, want, strict=True):
        written = model.generate(torch.tensor([Numbers().encode(source)]))[0].tolist()[1:]
        stops = [n for n, token in enumerate(written) if token in [ends, *_listed(ends)]]
        assert Numbers().decode(written[: stops[0] if stops else None]) == text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
