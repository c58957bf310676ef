"""Vocabularies of GGUF files split and end texts as llama.cpp does.

What is expected was computed with llama-cpp-python 0.3.36, from files with the same metadata.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.tokenizer.from_gguf import TokenType, files_of_metadata
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.hub.gguf_files import byte_level_metadata, sentencepiece_metadata

NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4
SIZE = 640
MORE = [
    ("  ", USER),
    ("<x y>", USER),
    ("<x", USER),
    ("x y>z", USER),
    ("\n\n", USER),
    ("<tool>", CONTROL),
    ("<|im_end|>", NORMAL),
    ("[PAD1]", UNKNOWN),
    ("", NORMAL),
]
# the ids with special tokens and without them; the same for both where there is one list
WITH_SPACE: list[tuple[str, list[int], list[int]]] = [
    (" a", [259, 543], []),
    ("</s>b", [2, 309], [540, 618, 605, 544, 591, 564]),
    ("</s> b", [2, 259, 564], [540, 618, 605, 544, 591, 309]),
    ("a</s> b c", [267, 2, 259, 564, 288], [267, 618, 605, 544, 591, 309, 288]),
    ("<s></s>a", [1, 2, 267], [540, 618, 544, 591, 618, 605, 544, 591, 543]),
    ("a  b", [267, 640, 309], []),
    ("a   b", [267, 640, 259, 564], []),
    ("a<x y>z", [267, 641, 540, 608], []),
    ("\n\na", [644, 267], []),
    ("a<tool>b", [267, 645, 309], [267, 618, 542, 548, 548, 549, 591, 564]),
    ("[PAD1]a", [647, 267], [540, 583, 595, 579, 598, 585, 582, 543]),
    ("<unk>a", [0, 267], [540, 618, 363, 571, 591, 543]),
    ("東<x", [540, 233, 160, 180, 642], []),
]
WITHOUT_SPACE: list[tuple[str, list[int], list[int]]] = [
    (" a", [267], []),
    ("a b", [543, 309], []),
    ("</s>b", [2, 564], [618, 605, 544, 591, 564]),
    ("a  b", [543, 640, 564], []),
    ("a<x y>z", [543, 641, 608], []),
    (
        " the<x y> </s>the",
        [290, 641, 540, 2, 542, 275],
        [290, 641, 540, 618, 605, 544, 591, 542, 275],
    ),
]
ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "  # noqa: RUF001
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
NO_ENDS = (
    "<|fim_prefix|> <fim-prefix> <PRE> <|code_prefix|> <|eos|> <|eot|> <|EOT|> <|end_of_turn|> <pad> "
    "<|endofturn|> <|channel|> <|message|> <|start|> <|constrain|> <|END_OF_TURN_TOKEN|>"
)


def read(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    for name, content in files_of_metadata(metadata).items():
        (folder / name).write_bytes(content)
    return Tokenizer.from_folder(folder)


def sentencepiece(more: list[tuple[str, int]] = MORE, **changes: Any) -> dict[str, Any]:
    """A vocabulary with more tokens; a change to `None` takes an entry out."""
    metadata = sentencepiece_metadata()
    for key, values in (("tokens", 0), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{key}"] += [token[values] for token in more]
    metadata["tokenizer.ggml.scores"] += [-1000.0] * len(more)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def byte_level(*names: str, kind: int = CONTROL, **changes: Any) -> dict[str, Any]:
    """A vocabulary whose special tokens have these names and this type."""
    metadata = byte_level_metadata()
    tokens, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    tokens[-6:] = [*names, *(f"<special{number}>" for number in range(6 - len(names)))]
    types[-6:] = [*[kind] * len(names), *[CONTROL] * (6 - len(names))]
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize("adds_space", [True, False])
def test_texts_around_special_and_user_defined_tokens(tmp_path: Path, adds_space: bool) -> None:
    changes = {} if adds_space else {"add_space_prefix": False}
    tokenizer = read(tmp_path, sentencepiece(**changes))
    for text, parsed, plain in WITH_SPACE if adds_space else WITHOUT_SPACE:
        assert tokenizer.encode(text, False, parse_special=True) == parsed, text
        assert tokenizer.encode(text, False, parse_special=False) == (plain or parsed), text
    assert tokenizer.vocab_size == SIZE + len(MORE)
    assert tokenizer.id_to_piece(SIZE + 8) == "[EMPTY_648]"
    assert tokenizer.decode([SIZE, SIZE + 1]) == "  <x y>"


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": None},
        {"scores": [0.0] * (SIZE + 3)},
        {"scores": [0] * SIZE},
        {"token_type": None},
        {"unknown_token_id": None, "bos_token_id": None, "eos_token_id": None},
        {"unknown_token_id": 10**6},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_a_file_may_leave_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Without scores each is 0; the ids of this text are then the same."""
    tokenizer = read(tmp_path, sentencepiece([], **changes))
    text = "Hello 😀 world"
    ids = [540, 616, 343, 319, 540, 243, 162, 155, 131, 322, 271, 549, 552]
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {2}


def test_several_unknown_tokens(tmp_path: Path) -> None:
    """Converters of 2024 typed the padding of Phi-3 so."""
    pads = [(f"[PAD{number}]", UNKNOWN) for number in range(16)]
    tokenizer = read(tmp_path, sentencepiece(pads))
    assert tokenizer.encode("[PAD3]a", False, parse_special=True) == [SIZE + 3, 267]
    assert tokenizer.encode("[PAD3]", False)[:2] == [540, 583]


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_lists_that_are_too_short_are_refused(key: str) -> None:
    metadata = sentencepiece()
    short = metadata[f"tokenizer.ggml.{key}"][:-1]
    with pytest.raises(
        CheckpointError, match=f"'tokenizer.ggml.{key}' must have one entry for each"
    ):
        files_of_metadata(metadata | {f"tokenizer.ggml.{key}": short})


@pytest.mark.sample(1, of="name")
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER])
@pytest.mark.parametrize("name", ENDS.split())
def test_ends_are_found_by_their_names(tmp_path: Path, name: str, kind: int) -> None:
    tokenizer = read(tmp_path, byte_level(name, kind=kind, eos_token_id=517))
    assert tokenizer.eos_token_ids == {512, 517}
    # whatever its type, it is a control token
    assert tokenizer.encode(f"a{name}", False, parse_special=True)[-1] == 512
    assert 512 not in tokenizer.encode(f"a{name}", False, parse_special=False)
    assert tokenizer.decode([512], skip_special_tokens=True) == ""


@pytest.mark.parametrize("name", NO_ENDS.split())
def test_names_that_end_nothing(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, byte_level(name, eos_token_id=517)).eos_token_ids == {517}


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        ("<|return|> <|call|> <|end|>", "<|return|> <|call|>"),
        ("<|return|> <|calls|> <|end|>", "<|return|> <|calls|>"),
        ("<|call|> <|flush|> <|end|>", "<|call|> <|flush|>"),
        ("<|return|> <|end|>", "<|return|> <|end|>"),
        ("<|tool_response> </s>", "<|tool_response>"),
        ("[PAD] <PAD>", "[PAD]"),
        ("<|fim_pad|> <|repo_name|> <|file_sep|>", "<|fim_pad|> <|repo_name|> <|file_sep|>"),
    ],
)
def test_ends_that_exclude_others(tmp_path: Path, names: str, ends: str) -> None:
    tokenizer = read(tmp_path, byte_level(*names.split(), eos_token_id=517))
    found = {tokenizer.id_to_piece(number) for number in tokenizer.eos_token_ids - {517}}
    assert found == set(ends.split())


def test_ends_that_the_file_names(tmp_path: Path) -> None:
    changes = {
        "eos_token_id": 517,
        "eot_token_id": 516,
        "eom_token_id": 515,
        "fim_sep_token_id": 514,
    }
    tokenizer = read(tmp_path, byte_level("<|file_sep|>", **changes))
    assert tokenizer.eos_token_ids == {514, 515, 516, 517}


def test_channels_are_shown(tmp_path: Path) -> None:
    tokenizer = read(
        tmp_path, byte_level("<|channel|>", "<|return|>", "<|call|>", "<|end|>", bos_token_id=517)
    )
    ids = tokenizer.encode("<|channel|>a<|end|>", False, parse_special=False)
    assert (ids[0], ids[-1]) == (512, 515)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|channel|>a<|end|>"


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ bos_token }}x"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_conversation_begins_with_the_first_token(
    tmp_path: Path, kind: str, template: str, adds_bos: bool
) -> None:
    """The server of llama.cpp adds it, unless the template wrote it or the file says no."""
    metadata = byte_level_metadata() if kind == "gpt2" else sentencepiece()
    metadata |= {"tokenizer.ggml.add_bos_token": adds_bos, "tokenizer.chat_template": template}
    tokenizer = read(tmp_path, metadata)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids.count(tokenizer.bos_token_id) == int(adds_bos or "bos" in template)
    assert (ids[0] == tokenizer.bos_token_id) == (adds_bos or "bos" in template)


def test_files_tell_where_they_come_from() -> None:
    """So that the rules hold for copies of them too, and a user-defined token stays one."""
    config = json.loads(files_of_metadata(sentencepiece())["tokenizer_config.json"])
    assert config["mlx_mmfree"] == {"source": "gguf"}
    listed = {
        entry["content"]: entry["special"] for entry in config["added_tokens_decoder"].values()
    }
    assert listed["<x y>"] is False and listed["<tool>"] is listed["<|im_end|>"] is True
    assert TokenType.USER_DEFINED == USER
