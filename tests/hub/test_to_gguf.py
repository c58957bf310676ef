"""GGUF files, read back exactly by this library and by the package `gguf`."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, ReaderField, dequantize, quantize
from mlx.utils import tree_flatten

from mlx_mmfree import demo
from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.files import gguf_blocks
from mlx_mmfree.hub import (
    convert,
    load,
    load_model,
    load_tokenizer,
    open_checkpoint,
    save_model,
)
from mlx_mmfree.hub.checkpoint.weight_format import WRITER_KEY
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.hub.conversion.to_gguf import WRITTEN
from mlx_mmfree.models.parts.rotation import Rotation
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from mlx_mmfree.ops import pack_ternary, ternarize
from mlx_mmfree.tokenizer.documents import train_vocabulary
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.version import __version__
from tests.hub.checkpoints import GOLDENS, tiny_checkpoint, tiny_transformer
from tests.tolerances import TOLERANCE, relative_error

SIZES: dict[str, Any] = {
    "vocab_size": 520,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "initializer_range": 0.05,
}
TOKENS = mx.array([[1, 7, 3, 39, 0, 12, 5]])
FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "llama"),
    ("llama", {"has_sub_norms": True}, "bitnet"),
    ("bitnet", {"tie_word_embeddings": True}, "bitnet-b1.58"),
    ("qwen3", {"rotation": Rotation(theta=1e6, scaling="linear", factor=2.0)}, "qwen3"),
    ("minicpm", {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 64.0}, "minicpm"),
]


def source(
    folder: Path, model_type: str = "llama", tokenizer: str = "tokenizer_bpe", **options: Any
) -> Path:
    model = tiny_transformer(model_type, **SIZES | {"num_hidden_layers": 1} | options)
    model.set_dtype(mx.bfloat16)
    save_model(folder, model, GOLDENS / tokenizer)
    return folder


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def field(reader: GGUFReader, name: str) -> Any:
    found = reader.get_field(name)
    assert isinstance(found, ReaderField), name
    return found.contents()


def floats_of(reader: GGUFReader) -> dict[str, np.ndarray]:
    return {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }


def own_vocabulary(folder: Path) -> Path:
    """A GGUF file of a model with a vocabulary that this library trained."""
    stories = read_documents(
        Path(__file__).parents[2] / "examples/demo_corpus/valid-storybooks.txt"
    )
    train_vocabulary(islice(stories, 30), SIZES["vocab_size"], folder / "tokenizer")
    model = tiny_transformer("llama", **SIZES | {"num_hidden_layers": 1})
    save_model(folder / "model", model, folder / "tokenizer")
    convert(open_checkpoint(folder / "model"), folder / "m", to="gguf", check=False)
    [file] = (folder / "m").glob("*.gguf")
    return file


def texts() -> list[str]:
    """Texts of letters, digits, punctuation and spaces of many kinds, drawn at random."""
    draw = random.Random(0)
    kinds = (
        "abcDEF'sStTrRemMlLdD  \n\r\t.,!?\"-0123456789",
        " \t\n\r\x0b\x0c\x85\xa0\u1680\u2003\u2028\u3000\u200b\ufeffaé1.",
        "\xe9\xfc\xdf\u0153\u017fK\u6771\u4eac\u043f\u0440\u0438\u0432\u0435\u0442\u0661\u0662\u2167\xbd\xb2\U0001f642\U0001f469\u200d\U0001f467e\u0301\xaa",
        "'\u2019\u201c\u201d\xab\u2014\u2013_()[]{}<>|/\\@#$%^&*+=~\xb4` aB1\n",
    )
    drawn = [
        "".join(draw.choices(draw.choice(kinds), k=draw.randrange(1, 40))) for _ in range(2000)
    ]
    return [*drawn, "It's I'M we'LL don'T 'tis", "a\n\n b \r\n\r\n  c", "1234567 3.14", " \n "]


def test_a_vocabulary_that_was_trained_here_comes_back(tmp_path: Path) -> None:
    file = own_vocabulary(tmp_path)
    assert field(GGUFReader(file), "tokenizer.ggml.pre") == "llama-bpe"
    want, got = (load_tokenizer(path) for path in (tmp_path / "tokenizer", file.parent))
    for text in texts():
        assert got.encode(text) == want.encode(text), text


@pytest.mark.interop
def test_llama_cpp_splits_texts_as_a_vocabulary_that_was_trained_here(tmp_path: Path) -> None:
    """All texts are equal with llama.cpp as llama-cpp-python 0.3.36 has it."""
    llama_cpp = pytest.importorskip("llama_cpp")
    file = own_vocabulary(tmp_path)
    theirs = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    ours = load_tokenizer(tmp_path / "tokenizer")
    for text in texts():
        want = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ours.encode(text, parse_special=False) == want, text


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["tq2_0", "tq1_0"])
@pytest.mark.parametrize(("model_type", "options", "architecture"), FAMILIES, ids=str)
def test_is_read_by_the_package_gguf(
    tmp_path: Path, kind: Any, model_type: str, options: dict[str, Any], architecture: str
) -> None:
    folder = source(tmp_path / "s", model_type, **options)
    convert(open_checkpoint(folder), tmp_path / "m", to="gguf", gguf_type=kind, check=False)
    reader = GGUFReader(tmp_path / "m" / f"m-{kind.upper()}.gguf")
    assert field(reader, "general.architecture") == architecture
    assert field(reader, f"{architecture}.attention.head_count_kv") == 2
    assert field(reader, f"{architecture}.feed_forward_length") == 512
    model = load_model(folder)
    got = floats_of(reader)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.ffn_down.weight"] == kind.upper()
    assert types["output_norm.weight"] == "F32" and types["token_embd.weight"] == "BF16"
    layer = load_model(folder, packed=False).blocks[0]
    masters = {
        "attn_q": layer.token_mixer.query_proj,
        "attn_output": layer.token_mixer.output_proj,
        "ffn_up": layer.channel_mixer.up_proj,
        "ffn_down": layer.channel_mixer.down_proj,
    }
    for name, module in masters.items():
        trits, scale = ternarize(module.weight)
        want = np.array(trits) * np.float32(np.float16(scale.item()))
        if architecture in ("llama", "minicpm") and name == "attn_q":
            # rows of each of the 4 heads: halves become pairs
            want = want.reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(256, 256)
        np.testing.assert_array_equal(got[f"blk.0.{name}.weight"], want)
    embedding = np.array(model.embed.weight.astype(mx.float32))
    np.testing.assert_array_equal(got["token_embd.weight"], embedding)
    assert ("output.weight" in got) == ("head" in model)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model_type", "options", "architecture"), FAMILIES, ids=str)
def test_i2_s_comes_back_without_loss(
    tmp_path: Path, model_type: str, options: dict[str, Any], architecture: str
) -> None:
    folder = source(tmp_path / "s", model_type, **options)
    report = convert(open_checkpoint(folder), tmp_path / "m", to="gguf", gguf_type="i2_s")
    assert report.total.difference == 0 and report.logits_difference == 0
    assert open_checkpoint(tmp_path / "m").config[WRITER_KEY] == {"version": __version__}
    want, got = (parameters(load_model(path)) for path in (folder, tmp_path / "m"))
    assert set(want) == set(got)
    for name, array in want.items():
        # vectors are written in float32, and gains stay so
        dtype = mx.float32 if "norm.weight" in name else array.dtype
        assert got[name].dtype == dtype and mx.array_equal(array, got[name]), name
    convert(open_checkpoint(tmp_path / "m"), tmp_path / "again", check=False)
    got = parameters(load_model(tmp_path / "again"))
    assert all(mx.array_equal(array, got[name]) for name, array in want.items())


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["tq2_0", "tq1_0"])
@pytest.mark.parametrize("model_type", ["bitnet", "llama"])
def test_scales_are_rounded_once(tmp_path: Path, kind: Any, model_type: str) -> None:
    folder = source(tmp_path / "s", model_type)
    report = convert(open_checkpoint(folder), tmp_path / "m", to="gguf", gguf_type=kind)
    want, got = (load_model(path) for path in (folder, tmp_path / "m"))
    differences = []
    for theirs, ours in zip(want.blocks, got.blocks, strict=True):
        for name in ("gate_proj", "up_proj", "down_proj"):
            a, b = theirs.channel_mixer[name], ours.channel_mixer[name]
            assert mx.array_equal(a.weight, b.weight)
            assert b.scale.item() == np.float32(np.float16(a.scale.item()))
            differences.append(abs(a.scale.item() - b.scale.item()))
    assert report.groups["ternary matrices"].difference >= max(differences) > 0


def test_dense_model_without_ternary_tensors(tmp_path: Path) -> None:
    folder = source(tmp_path / "s", linears=None)
    convert(open_checkpoint(folder), tmp_path / "m", to="gguf", check=False)
    file = next((tmp_path / "m").glob("*.gguf"))
    assert file.name == "m-BF16.gguf"
    reader = GGUFReader(file)
    assert {tensor.tensor_type for tensor in reader.tensors} == {
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.F32,
    }
    ours, theirs = (load_model(path)(TOKENS)[0] for path in (folder, tmp_path / "m"))
    assert relative_error(theirs, ours) <= TOLERANCE[mx.bfloat16]


@pytest.mark.parametrize(
    ("model_type", "options", "file_name"),
    [("llama", {}, "m-TQ2_0.gguf"), ("bitnet", {"tie_word_embeddings": True}, "m-I2_S.gguf")],
    ids=str,
)
def test_without_a_type_some_program_opens_the_file(
    tmp_path: Path, model_type: str, options: dict[str, Any], file_name: str
) -> None:
    folder = source(tmp_path / "s", model_type, **options)
    report = convert(open_checkpoint(folder), tmp_path / "m", to="gguf")
    assert [file.name for file in (tmp_path / "m").glob("*.gguf")] == [file_name]
    programs = {each.runtime: each.opens for each in report.openings}
    assert programs["llama.cpp"] or programs["bitnet.cpp"] is not False


@pytest.mark.parametrize("tokenizer", ["tokenizer_bpe", "tokenizer_spm"])
def test_vocabulary(tmp_path: Path, tokenizer: str) -> None:
    folder = source(tmp_path / "s", tokenizer=tokenizer, vocab_size=704)
    convert(open_checkpoint(folder), tmp_path / "m", to="gguf", check=False)
    _, want = load(folder)
    _, got = load(tmp_path / "m")
    for text in ("Once upon a time, 1234!", "  Grüße 東京 🙂\n\n x", "a<|eot_id|>b</s>"):
        for parse in (True, False):
            ids = [t.encode(text, parse_special=parse) for t in (want, got)]
            assert ids[0] == ids[1]
        assert got.decode(ids[1]) == want.decode(ids[0])
    # llama.cpp finds further ends by their names
    named = {513} if tokenizer == "tokenizer_bpe" else set()
    assert got.eos_token_ids == want.eos_token_ids | named
    assert got.bos_token_id == want.bos_token_id
    messages = [{"role": "user", "content": "Hi"}]
    if tokenizer == "tokenizer_bpe":
        assert got.apply_chat_template(messages) == want.apply_chat_template(messages)
    reader = GGUFReader(next((tmp_path / "m").glob("*.gguf")))
    tokens = field(reader, "tokenizer.ggml.tokens")
    kinds = field(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == len(kinds) == 704
    unused = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 5]
    assert unused == [f"[PAD{number}]" for number in range(want.vocab_size, 704)]


def test_a_vocabulary_file_may_be_large(tmp_path: Path) -> None:
    folder = source(tmp_path / "s", tokenizer="tokenizer_bpe", vocab_size=704)
    # as large as vocabularies of a quarter of a million tokens
    with (folder / "tokenizer.json").open("ab") as file:
        file.write(b" " * 20_000_000)
    convert(open_checkpoint(folder), tmp_path / "m", to="gguf", check=False)
    want, got = load_tokenizer(folder), load_tokenizer(tmp_path / "m")
    assert got.encode("Once upon a time") == want.encode("Once upon a time")


def test_tokens_of_other_files_keep_their_kind(tmp_path: Path) -> None:
    """Tokens have the types that llama.cpp's converter gives them."""
    folder = source(tmp_path / "s", tokenizer="tokenizer_spm", vocab_size=704)
    chunk = b"\x0a\x05<x y>\x15\0\0\x7a\xc4\x18\x04"
    with (folder / "tokenizer.model").open("ab") as file:
        file.write(b"\x0a" + bytes([len(chunk)]) + chunk)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for number, text, special in ((641, "<tool>", True), (642, "</line>", False)):
        config["added_tokens_decoder"][str(number)] = {"content": text, "special": special}
    config |= {"add_prefix_space": False, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    convert(open_checkpoint(folder), tmp_path / "m", to="gguf")
    reader = GGUFReader(next((tmp_path / "m").glob("*.gguf")))
    kinds = field(reader, "tokenizer.ggml.token_type")
    assert [kinds[n] for n in (0, 1, 640, 641, 642, 643)] == [2, 3, 4, 3, 4, 5]
    assert field(reader, "tokenizer.ggml.add_space_prefix") is False
    assert field(reader, "tokenizer.ggml.add_eos_token") is True
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.encode("a<x y>b")[2] == 640
    assert tokenizer.encode("a") == load_tokenizer(folder).encode("a")


def test_named_chat_templates_go_both_ways(tmp_path: Path) -> None:
    """With the keys of the package gguf, which llama.cpp reads."""
    folder = source(tmp_path / "s")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "plain"}))
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "a-b"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"with {name}")
    convert(open_checkpoint(folder), tmp_path / "m", to="gguf", check=False)
    reader = GGUFReader(next((tmp_path / "m").glob("*.gguf")))
    assert field(reader, "tokenizer.chat_template") == "plain"
    assert field(reader, "tokenizer.chat_template.tool_use") == "with tool_use"
    assert sorted(field(reader, "tokenizer.chat_templates")) == ["a_b", "tool_use"]
    assert load_tokenizer(tmp_path / "m").chat_templates == {
        "default": "plain",
        "tool_use": "with tool_use",
        "a_b": "with a-b",
    }
    convert(open_checkpoint(tmp_path / "m"), tmp_path / "h", to="hf", check=False)
    assert (
        load_tokenizer(tmp_path / "h").chat_templates
        == load_tokenizer(tmp_path / "m").chat_templates
    )


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_those_of_the_package_gguf(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    trits = rng.integers(-1, 2, (6, 768), dtype=np.int8)
    scale = np.float32(np.float16(rng.uniform(0.01, 2)))
    data = gguf_blocks.encode(WRITTEN[kind], (trits + 1).astype(np.uint8), float(scale))
    theirs = dequantize(data.reshape(6, -1), GGMLQuantizationType[kind])
    np.testing.assert_array_equal(theirs, trits * scale)
    want = quantize((trits * scale).astype(np.float32), GGMLQuantizationType[kind])
    np.testing.assert_array_equal(data, want.reshape(-1))


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0", "I2_S"])
def test_codes_come_back(kind: str) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 3, (5, 512), dtype=np.uint8)
    words = np.array(pack_ternary(mx.array(codes.astype(np.int32) - 1)))
    np.testing.assert_array_equal(gguf_blocks.unpack_codes(words, 512), codes)
    stored = WRITTEN[kind]
    data = gguf_blocks.encode(stored, codes, 0.5)
    assert data.size == stored.nbytes(codes.size) and stored.codes is not None
    np.testing.assert_array_equal(stored.codes(stored.blocks(data))[0].reshape(5, 512), codes)


ROTATIONS = [
    Rotation(scaling="yarn", factor=4.0, trained_length=64, attention_factor=1.138629436),
    Rotation(scaling="yarn", factor=4.0, trained_length=64, attention_factor=0.75),
    Rotation(
        scaling="yarn",
        factor=2.5,
        trained_length=64,
        attention_factor=1.09162907,
        beta_fast=16.0,
        beta_slow=2.0,
    ),
    Rotation(theta=5e5, scaling="llama3", factor=8.0, trained_length=64),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_stretched_positions_come_back(tmp_path: Path, rotation: Rotation) -> None:
    folder = source(tmp_path / "s", rotation=rotation, max_position_embeddings=512)
    convert(open_checkpoint(folder), tmp_path / "m", to="gguf", check=False)
    want, got = (load_model(path, dtype=mx.float32) for path in (folder, tmp_path / "m"))
    ropes = [model.blocks[0].token_mixer.rope for model in (want, got)]
    assert relative_error(ropes[1].wavelengths, ropes[0].wavelengths) <= 1e-6
    assert ropes[1].query_scale == pytest.approx(ropes[0].query_scale, rel=1e-6)
    reader = GGUFReader(next((tmp_path / "m").glob("*.gguf")))
    if rotation.scaling == "yarn":
        assert field(reader, "llama.rope.scaling.type") == "yarn"
        assert field(reader, "llama.rope.scaling.original_context_length") == 64
    else:
        assert floats_of(reader)["rope_freqs.weight"].max() == pytest.approx(8.0)


class TestRefused:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("options", "formats", "kind", "text"),
        [
            ({"intermediate_size": 384}, FloatFormats(), "tq2_0", "I2_S takes multiples of 128"),
            ({}, FloatFormats(), "q1_0", "Q1_0 holds signs alone"),
            ({"intermediate_size": 300}, FloatFormats(), "i2_s", "fit the 300 inputs"),
            ({"attention_bias": True}, FloatFormats(), "tq2_0", "no bias"),
            ({"linears": TernaryLinears(norm_eps=1e-6)}, FloatFormats(), "tq2_0", "no norm inside"),
            ({}, FloatFormats(embed_bits=4), "tq2_0", "'embed_bits'"),
            (
                {"rotation": Rotation(scaling="dynamic", factor=8.0, trained_length=64)},
                FloatFormats(),
                "tq2_0",
                "scaled dynamically",
            ),
            (
                {"rotation": Rotation(scaling="yarn", factor=2.0, is_rounded=False)},
                FloatFormats(),
                "tq2_0",
                "YaRN must blend",
            ),
            (
                {"model_type": "qwen3", "rotation": Rotation(scaling="llama3", factor=8.0)},
                FloatFormats(),
                "tq2_0",
                "scaled by llama3 in architecture qwen3",
            ),
            # llama.cpp does not open such a file
            (
                {"has_sub_norms": True, "rotation": Rotation(scaling="llama3", factor=8.0)},
                FloatFormats(),
                "tq2_0",
                "scaled by llama3 in architecture bitnet",
            ),
        ],
        ids=str,
    )
    def test_what_llama_cpp_lacks(
        self, tmp_path: Path, options: dict[str, Any], formats: FloatFormats, kind: Any, text: str
    ) -> None:
        folder = source(tmp_path / "s", **options)
        with pytest.raises(UnsupportedModelError, match=text):
            convert(
                open_checkpoint(folder), tmp_path / "m", to="gguf", gguf_type=kind, formats=formats
            )
        assert not (tmp_path / "m").exists()

    def test_matmul_free_models(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "s"))
        with pytest.raises(
            UnsupportedModelError, match="which this library does not write as GGUF"
        ):
            convert(checkpoint, tmp_path / "m", to="gguf")

    def test_a_vocabulary_that_splits_texts_in_another_way(self, tmp_path: Path) -> None:
        model = tiny_transformer("llama", **SIZES | {"num_hidden_layers": 1, "vocab_size": 2048})
        save_model(tmp_path / "s", model, demo.path())
        with pytest.raises(
            UnsupportedModelError, match="must split text before merging as"
        ) as caught:
            convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", to="gguf")
        assert "{" not in str(caught.value) and not (tmp_path / "m").exists()

    def test_missing_tokenizer(self, tmp_path: Path) -> None:
        save_model(tmp_path / "s", tiny_transformer(**SIZES))
        with pytest.raises(CheckpointError, match="tokenizer"):
            convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", to="gguf")

    def test_tokenizer_without_merges(self, tmp_path: Path) -> None:
        file = source(tmp_path / "s") / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["merges"] = []
        file.write_text(json.dumps(content))
        with pytest.raises(UnsupportedModelError, match="must have merges of tokens"):
            convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", to="gguf")
        assert not (tmp_path / "m").exists()
