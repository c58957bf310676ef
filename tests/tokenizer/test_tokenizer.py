"""The tokenizer equals the reference ids and texts and obeys the files beside the vocabulary."""

import codecs
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.tokenizer import vocabulary
from mlx_mmfree.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
SPM, BPE = GOLDENS / "tokenizer_spm", GOLDENS / "tokenizer_bpe"
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


def golden(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tokenizer_golden.json").read_text()))


def copy(source: Path, target: Path, **config: Any) -> Path:
    """A copy of a folder with some entries of its tokenizer_config.json changed."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*golden*"))
    file = target / "tokenizer_config.json"
    entries = json.loads(file.read_text()) | config
    file.write_text(json.dumps({k: v for k, v in entries.items() if v is not ...}))
    return target


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


@pytest.mark.parametrize("folder", [SPM, BPE], ids=lambda folder: folder.name)
def test_plain_text_round_trips(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for item in golden(folder)["items"]:
        if BLANK not in item["text"] or folder == BPE:
            ids = tokenizer.encode(item["text"], False, parse_special=False)
            assert tokenizer.decode(ids) == item["text"]
            assert not tokenizer.special_tokens.keys() & set(map(tokenizer.id_to_piece, ids))


def test_parse_special_is_forced_for_both_formats() -> None:
    for folder, text in ((SPM, "a</s>b"), (BPE, "a<|eot_id|>b")):
        tokenizer = Tokenizer.from_folder(folder)
        end = next(iter(tokenizer.eos_token_ids))
        parsed = tokenizer.encode(text, False, parse_special=True)
        plain = tokenizer.encode(text, False, parse_special=False)
        assert end in parsed
        assert end not in plain
        assert tokenizer.encode(text, False) == (parsed if folder == BPE else plain)
        assert tokenizer.decode(parsed) == tokenizer.decode(plain) == text


def test_named_tokens() -> None:
    tokenizer = Tokenizer.from_folder(SPM)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer.from_folder(BPE)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (512, {517})
    assert len(tokenizer.special_tokens) == 6


def test_model_file_alone(tmp_path: Path) -> None:
    shutil.copyfile(SPM / "tokenizer.model", tmp_path / "tokenizer.model")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a") == [1, 267]
    assert tokenizer.eos_token_ids == {2}
    assert not tokenizer.has_chat_template


def test_json_goes_before_model(tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "both")
    shutil.copyfile(SPM / "tokenizer.model", folder / "tokenizer.model")
    assert Tokenizer.from_folder(folder).vocab_size == 518


@pytest.mark.parametrize("folder", [SPM, BPE], ids=lambda folder: folder.name)
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_frame_follows_the_config(
    folder: Path, add_bos: bool, add_eos: bool, tmp_path: Path
) -> None:
    changed = copy(folder, tmp_path / "copy", add_bos_token=add_bos, add_eos_token=add_eos)
    tokenizer = Tokenizer.from_folder(changed)
    ids = tokenizer.encode("Hello", add_special_tokens=False)
    first = [tokenizer.bos_token_id] if add_bos else []
    last = [*tokenizer.eos_token_ids] if add_eos else []
    assert tokenizer.encode("Hello") == [*first, *ids, *last]


def test_ends_of_text_from_all_files(tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "copy", eos_token="<|end_of_text|>", chat_template=...)
    write_json(folder / "config.json", {"eos_token_id": 5})
    assert Tokenizer.from_folder(folder).eos_token_ids == {5, 513}
    write_json(folder / "generation_config.json", {"eos_token_id": [514, 515]})
    assert Tokenizer.from_folder(folder).eos_token_ids == {5, 513, 514, 515}
    write_json(folder / "generation_config.json", {"eos_token_id": 514})
    write_json(folder / "config.json", {"eos_token_id": [5, 6]})
    assert Tokenizer.from_folder(folder).eos_token_ids == {5, 6, 513, 514}


def test_end_of_turn_of_the_chat_template_ends_text(tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "copy", eos_token="<|end_of_text|>")
    assert Tokenizer.from_folder(folder).eos_token_ids == {513, 517}


def test_token_objects_and_special_tokens_map(tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "copy", eos_token=..., bos_token={"content": "<|eot_id|>"})
    write_json(folder / "special_tokens_map.json", {"eos_token": "<|end_of_text|>"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id == 517
    assert tokenizer.eos_token_ids == {513, 517}


def test_remarks_on_odd_pieces_do_not_reach_standard_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = (SPM / "tokenizer.model").read_bytes()
    # one more piece, a null character of the kind "normal"
    piece = b"\x0a\x01\0\x15\0\0\0\0\x18\x01"
    (tmp_path / "tokenizer.model").write_bytes(data + b"\x0a" + bytes([len(piece)]) + piece)
    Tokenizer.from_folder(tmp_path)
    assert capfd.readouterr().err == ""


# transformers 5.24.0 gives these pieces
SPACES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "first": (
        {"legacy": False},
        {"a b": "▁a ▁b", "</s>b": "</s> b", "</s> b": "</s> ▁b", "a</s>\nb": "▁a </s> <0x0A> b"},
    ),
    "not reported": (
        {"legacy": ...},
        {"a b": "▁a ▁b", "a</s>b c": "▁a </s> b ▁c", "<unk>a": "<unk> a"},
    ),
    "legacy": (
        {"legacy": True},
        {
            "a b": "▁a ▁b",
            "</s>b": "</s> ▁b",
            "</s> b": "</s> ▁b",
            "a</s>b c": "▁a </s> ▁b ▁c",
            "a</s> b c": "▁a </s> ▁b ▁c",
            "<s></s>a": "<s> </s> ▁a",
            "<unk>a": "<unk> ▁a",
            "a</s>\nb": "▁a </s> ▁ <0x0A> b",
        },
    ),
    "never": (
        {"legacy": True, "add_prefix_space": False},
        {"a b": "a ▁b", "</s>b": "</s> b", "a</s> b c": "a </s> ▁b ▁c", "\na": "<0x0A> a"},
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_spaces_before_texts_and_after_special_tokens(tmp_path: Path, name: str) -> None:
    config, pieces = SPACES[name]
    tokenizer = Tokenizer.from_folder(copy(SPM, tmp_path / "copy", **config))
    for text, want in pieces.items():
        ids = tokenizer.encode(text, False, parse_special=True)
        assert " ".join(map(tokenizer.id_to_piece, ids)) == want, text
        assert tokenizer.decode(tokenizer.encode("a b", False)) == "a b"
    assert tokenizer.id_to_piece(tokenizer.encode_continuation("a")[0]) == "a"
    the = next(n for n in range(640) if tokenizer.id_to_piece(n) == f"{BLANK}the")
    assert tokenizer.decode([the]) == (" the" if name == "never" else "the")


# transformers 5.24.0 gives these pieces: it finds user-defined ones before it splits a text
USER_DEFINED = {
    False: {
        "a<x y>b": "▁a <x y> b",
        "a<x y> b": "▁a <x y> ▁b",
        "<x y>b": "<x y> b",
        "a<tool>b": "▁a <tool> b",
        f"a{' ' * 12}b": f"▁a {'▁' * 12} b",
    },
    True: {
        "a<x y>b": "▁a <x y> ▁b",
        "a<x y> b": "▁a <x y> ▁b",
        "<x y>b": "<x y> ▁b",
        "a<tool>b": "▁a <tool> ▁b",
        f"a{' ' * 12}b": f"▁a {'▁' * 12} b",
    },
}


@pytest.mark.parametrize("legacy", USER_DEFINED)
def test_user_defined_pieces(tmp_path: Path, legacy: bool) -> None:
    folder = copy(SPM, tmp_path / "copy", legacy=legacy)
    with (folder / "tokenizer.model").open("ab") as file:
        for text in ("<x y>", "<tool>", BLANK * 12):
            piece = (
                b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15\0\0\x7a\xc4\x18\x04"
            )
            file.write(b"\x0a" + bytes([len(piece)]) + piece)
    tokenizer = Tokenizer.from_folder(folder)
    for text, want in USER_DEFINED[legacy].items():
        for parse in (True, False):
            ids = tokenizer.encode(text, False, parse_special=parse)
            assert " ".join(map(tokenizer.id_to_piece, ids)) == want, text
        assert legacy or tokenizer.decode(ids) == text


def test_a_text_in_parts_has_spaces_as_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(copy(SPM, tmp_path / "copy", legacy=True))
    for parts in (["a</s>", "b c"], ["</s>", "b</s>", "c"], ["a", " b</s>c"]):
        found = tokenizer.encode_parts(parts, parse_special=True)
        whole = tokenizer.encode("".join(parts), parse_special=True)
        assert [number for ids in found for number in ids] == whole


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_continuation_in_json_has_no_space_of_its_own(metaspace: bool, tmp_path: Path) -> None:
    llama_style(tmp_path / "copy", metaspace)
    tokenizer = Tokenizer.from_folder(tmp_path / "copy")
    assert list(map(tokenizer.id_to_piece, tokenizer.encode_continuation("a"))) == ["a"]
    assert list(map(tokenizer.id_to_piece, tokenizer.encode_continuation(" a"))) == [f"{BLANK}a"]
    # after a special token, the older style has one
    [_, _, last] = tokenizer.encode("</s>a")
    assert tokenizer.id_to_piece(last) == ("a" if metaspace else f"{BLANK}a")


def test_added_tokens_of_a_sentencepiece_model(tmp_path: Path) -> None:
    folder = copy(SPM, tmp_path / "copy")
    write_json(folder / "added_tokens.json", {"<pad>": 640, "</line>": 641})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 642
    assert tokenizer.decode([267, 641]) == "a</line>"
    assert tokenizer.encode("a</line>", False, parse_special=True) == [267, 641]


def test_tokens_that_only_the_config_calls_special(tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "copy", additional_special_tokens=["The"])
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens(["The"])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    number = tokenizer.special_tokens["The"]
    assert number in tokenizer.encode("The end")
    assert number not in tokenizer.encode("The end", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("The end"), skip_special_tokens=True) == " end"


def llama_style(folder: Path, metaspace: bool) -> LibraryTokenizer:
    """A tiny BPE with byte fallback, in the older or the newer style of marking blanks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [BLANK, *"abc", f"{BLANK}a", "bc"]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[(BLANK, "a"), ("b", "c")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    library = LibraryTokenizer(model)
    if metaspace:
        library.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "first", False)
    else:
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
        )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokens = [AddedToken(text, normalized=False, special=True) for text in pieces[:3]]
    library.add_special_tokens(tokens)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}",
        },
    )
    return library


@pytest.mark.parametrize("metaspace", [False, True])
def test_byte_fallback_in_json(metaspace: bool, tmp_path: Path) -> None:
    library = llama_style(tmp_path / "copy", metaspace)
    tokenizer = Tokenizer.from_folder(tmp_path / "copy")
    for text in ("", "abc", " abc", "a bc  a", "\u65e5\U0001f600a", "<s>abc</s> abc", "x</s>"):
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, True) == library.decode(ids, skip_special_tokens=True)
        chunks = list(map(tokenizer.detokenizer().add, ids))
        assert not any("\N{REPLACEMENT CHARACTER}" in chunk for chunk in chunks)


@pytest.mark.parametrize("metaspace", [False, True])
def test_chat_splits_like_the_library(metaspace: bool, tmp_path: Path) -> None:
    library = llama_style(tmp_path / "copy", metaspace)
    tokenizer = Tokenizer.from_folder(tmp_path / "copy")
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "a <"}])
    assert plain == library.encode("<s>[a <]").ids
    spelled = tokenizer.apply_chat_template([{"role": "user", "content": "a</s>"}])
    assert spelled[0] == 1
    assert 2 not in spelled
    assert tokenizer.decode(spelled[1:]) == "[a</s>]"


def test_decoders_that_need_the_whole_text_are_refused(tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "copy")
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    library.decoder = decoders.CTC()
    library.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="has 'CTC'"):
        Tokenizer.from_folder(folder)


def test_word_prefixes_are_refused(tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "copy")
    state = json.loads((folder / "tokenizer.json").read_text())
    for prefix in (None, ""):
        state["model"]["continuing_subword_prefix"] = prefix
        write_json(folder / "tokenizer.json", state)
        assert Tokenizer.from_folder(folder).encode("The")[0] == 512
    for prefix in ("\0", "##"):
        state["model"]["continuing_subword_prefix"] = prefix
        write_json(folder / "tokenizer.json", state)
        with pytest.raises(UnsupportedModelError, match="must have no 'continuing_subword_prefix'"):
            Tokenizer.from_folder(folder)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "copy")
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=10_000)
    library.save(str(folder / "tokenizer.json"))
    text = "a long text about nothing"
    assert Tokenizer.from_folder(folder).encode(text) == Tokenizer.from_folder(BPE).encode(text)


def test_decode_accepts_arrays() -> None:
    tokenizer = Tokenizer.from_folder(BPE)
    assert tokenizer.decode(np.array([39, 68])) == tokenizer.decode([39, 68])


@pytest.mark.parametrize("folder", [SPM, BPE], ids=lambda folder: folder.name)
def test_bad_arguments(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(ValueError, match="lone surrogate at position 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TypeError, match="must be a str but got bytes"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]
    for token_id in (-1, tokenizer.vocab_size, 2**33):
        with pytest.raises(ValueError, match=rf"but got {token_id}\."):
            tokenizer.decode([5, token_id])
    with pytest.raises(TypeError, match=r"'ids' must be whole numbers .* but got list"):
        tokenizer.decode(np.array([[5, 6]]))
    with pytest.raises(TypeError, match=r"'ids' must be a list of token ids but got int"):
        tokenizer.decode(5)  # type: ignore[arg-type]


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must hold 'tokenizer.json' or 'tokenizer.model'"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="must hold"):
        Tokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[" * 100_000, b"\xff\xfe", b"null"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_json(
    name: str, content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copy(BPE, tmp_path / "copy")
    (folder / name).write_bytes(content)
    if (name, content) == ("tokenizer_config.json", b"{}"):
        assert Tokenizer.from_folder(folder).encode("a") == [512, 64]
        return
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_folder(folder)
    assert capfd.readouterr().err == ""


def test_panic_in_the_library_is_a_clean_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = copy(BPE, tmp_path / "copy")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["post_processor"]["processors"][1]["special_tokens"] = {}
    write_json(folder / "tokenizer.json", state)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json' is damaged"):
        Tokenizer.from_folder(folder)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("piece", [b"<unk>", b"the"])
def test_pieces_that_are_no_text(piece: bytes, tmp_path: Path) -> None:
    folder = copy(SPM, tmp_path / "copy")
    content = (SPM / "tokenizer.model").read_bytes()
    assert piece in content
    (folder / "tokenizer.model").write_bytes(content.replace(piece, b"\x96" + piece[1:], 1))
    with pytest.raises(CheckpointError, match=r"tokenizer\.model' is damaged"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("size", [0, 1, 100, 5000, 9169])
def test_truncated_model(size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = copy(SPM, tmp_path / "copy")
    (folder / "tokenizer.model").write_bytes((SPM / "tokenizer.model").read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"tokenizer\.model' is damaged"):
        Tokenizer.from_folder(folder)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bos_token", 5),
        ("eos_token", ["</s>"]),
        ("add_bos_token", "yes"),
        ("added_tokens_decoder", [1]),
        ("added_tokens_decoder", {"x": {"content": "y"}}),
        ("added_tokens_decoder", {"5": {"content": 7}}),
        ("added_tokens_decoder", {"5": {"content": "y", "special": 1}}),
        ("additional_special_tokens", "x"),
        ("chat_template", 5),
        ("chat_template", [{"name": "default"}]),
    ],
)
@pytest.mark.parametrize("source", [SPM, BPE], ids=lambda folder: folder.name)
def test_wrong_types_in_the_config(source: Path, key: str, value: Any, tmp_path: Path) -> None:
    folder = copy(source, tmp_path / "copy", **{key: value})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json'.*{key}.* must"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("value", ["2", -1, [1, None], True, 2**40, {}, 1.5])
def test_wrong_end_of_text_in_the_model_config(value: Any, tmp_path: Path) -> None:
    folder = copy(SPM, tmp_path / "copy")
    write_json(folder / "config.json", {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"config\.json'.*eos_token_id"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_absurdly_large_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / name, "wb") as stream:
        stream.truncate(vocabulary.MAX_VOCABULARY_BYTES + 1)
    with pytest.raises(CheckpointError, match="more than the 64,000,000"):
        Tokenizer.from_folder(tmp_path)


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_byte_order_mark_before_a_file_does_not_count(name: str, tmp_path: Path) -> None:
    folder = copy(BPE, tmp_path / "marked")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    want = Tokenizer.from_folder(folder)
    (folder / name).write_bytes(codecs.BOM_UTF8 + (folder / name).read_bytes())
    got = Tokenizer.from_folder(folder)
    assert got.encode("Hello world") == want.encode("Hello world")
    assert got.special_tokens == want.special_tokens
    assert got.chat_template_source() == want.chat_template_source()
