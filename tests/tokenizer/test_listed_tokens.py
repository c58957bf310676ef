"""Tokens that settings list beside the vocabulary, against transformers, which mlx-lm goes by."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.tokenizer.to_gguf import vocabulary_metadata
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.test_tokenizer import BPE, SPM, copy, write_json

SIZES = {BPE: 518, SPM: 640}
TEXT = "hi<think> x  <|im_end|>  y</think>\nThe <tool> z"


def token(content: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **usual, **flags}


THINK, END = token("<think>"), token("<|im_end|>", special=True)
TABLE: dict[str, Any] = {"added_tokens_decoder": [THINK, END]}
SETTINGS: dict[str, dict[str, Any]] = {
    "table": TABLE,
    "spaces": {
        "added_tokens_decoder": [
            token("<think>", lstrip=True, rstrip=True),
            token("<|im_end|>", special=True, rstrip=True),
            token("The", single_word=True),
        ]
    },
    "end named nowhere else": {**TABLE, "eos_token": "</think>"},
    "others": {**TABLE, "additional_special_tokens": ["<tool>", "</think>"]},
    "others by their newer name": {
        **TABLE,
        "additional_special_tokens": ["<tool>"],
        "extra_special_tokens": ["</think>"],
    },
    "without a table": {
        "added_tokens_decoder": None,
        "extra_special_tokens": ["<tool>"],
        "eos_token": "<|im_end|>",
    },
    "a role of one model": {**TABLE, "image_token": "<tool>"},
}


def folder_of(target: Path, source: Path, settings: dict[str, Any]) -> Path:
    """A copy of a tokenizer with other settings; a list stands for tokens after its own."""
    folder = copy(source, target)
    file = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    added = settings.get("added_tokens_decoder") or []
    listed = {str(SIZES[source] + n): each for n, each in enumerate(added)}
    table = config.pop("added_tokens_decoder") | listed
    config |= {key: value for key, value in settings.items() if key != "added_tokens_decoder"}
    if settings.get("added_tokens_decoder", ()) is not None:
        config["added_tokens_decoder"] = table
    if source == BPE:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(file, config)
    return folder


def assert_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    want = theirs.encode(TEXT, add_special_tokens=False)
    assert ours.encode(TEXT, False, parse_special=True) == want
    assert ours.eos_token_id == theirs.eos_token_id
    for skips in (False, True):
        assert ours.decode(want, skips) == theirs.decode(want, skip_special_tokens=skips)


@pytest.mark.sample(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("source", [BPE, SPM], ids=["bpe", "spm"])
def test_listed_tokens(tmp_path: Path, source: Path, settings: dict[str, Any]) -> None:
    assert_are_those_of_transformers(folder_of(tmp_path / "m", source, settings))


def test_older_files_count_without_a_table(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", BPE, {"added_tokens_decoder": None})
    write_json(folder / "added_tokens.json", {"<think>": 518, "</think>": 519})
    names = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<tool>"]}
    write_json(folder / "special_tokens_map.json", names)
    assert_are_those_of_transformers(folder)


def test_flags_of_the_settings_go_before_those_of_the_vocabulary(tmp_path: Path) -> None:
    flags = [token("<think>", rstrip=True), token("<|im_end|>", lstrip=True, special=True)]
    folder = folder_of(tmp_path / "m", BPE, {"added_tokens_decoder": flags})
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    document["added_tokens"] += [{"id": 518, **THINK}, {"id": 519, **END}]
    write_json(file, document)
    assert_are_those_of_transformers(folder)


def test_an_id_that_leaves_others_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", BPE, {})
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["added_tokens_decoder"]["600"] = THINK
    write_json(file, config)
    with pytest.raises(CheckpointError, match=r"for each id below 600.*would get 518"):
        Tokenizer.from_folder(folder)


def test_long_listed_tokens_are_used_with_limits(tmp_path: Path) -> None:
    text = "<" + "a" * 300 + ">"
    settings = {"added_tokens_decoder": [token(text)]}
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path / "m", BPE, settings))
    assert tokenizer.encode(f"x{text}", False) == [*tokenizer.encode("x", False), 518]


@pytest.mark.parametrize("source", [BPE, SPM], ids=["bpe", "spm"])
def test_gguf_has_them(tmp_path: Path, source: Path) -> None:
    folder = folder_of(tmp_path / "m", source, TABLE)
    size = SIZES[source]
    metadata = vocabulary_metadata(folder, size + 2)
    assert metadata["tokenizer.ggml.tokens"][size:] == ["<think>", "<|im_end|>"]
    # user-defined, and control
    assert list(map(int, metadata["tokenizer.ggml.token_type"][size:])) == [4, 3]
