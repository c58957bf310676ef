"""GGUF files: containers, tensor types, models of every architecture, vocabularies."""

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError, MMFreeError, UnsupportedModelError
from mlx_mmfree.files.gguf_blocks import TYPES, dequantized, ternary_words
from mlx_mmfree.files.gguf_file import read_gguf
from mlx_mmfree.generation import generate
from mlx_mmfree.hub import (
    convert,
    load,
    load_model,
    load_tokenizer,
    needed_bytes,
    open_checkpoint,
    save_model,
)
from mlx_mmfree.layers import PackedBitLinear, PackedLinear, pack_linears
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import Decoder
from mlx_mmfree.models.parts.rotation import Rotation
from mlx_mmfree.ops import pack_ternary
from mlx_mmfree.tokenizer.from_gguf import files_of_metadata
from tests.hub.checkpoints import GOLDENS, TOKENS, logits, tiny_transformer
from tests.hub.gguf_files import (
    byte_level_metadata,
    i2_s,
    metadata_of,
    sentencepiece_metadata,
    stored,
    tensors_of,
    write_gguf,
)
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import HubServer
from tests.tolerances import TOLERANCE, relative_error

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
# TQ blocks have 256 inputs
WIDE = SIZES | {"hidden_size": 256, "head_dim": 64}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bitnet-b1.58": {"model_type": "bitnet", "tie_word_embeddings": True},
    "bitnet-25": {"model_type": "bitnet"},
    "bitnet": {"has_sub_norms": True, "tie_word_embeddings": True},
    "llama": {},
    # over the root of 2 layers, this is a power of two, which float32 holds
    "minicpm": {"model_type": "minicpm", "scale_emb": 12.0, "scale_depth": 2.0**0.5},
}


def half_precision(model: Decoder) -> Decoder:
    """The model with an embedding and a head that float16 holds."""
    for module in (model.embed, model.get("head", model.embed)):
        module.weight = module.weight.astype(mx.float16).astype(mx.float32)
    return model


def tiny_file(
    file: Path, architecture: str = "bitnet-b1.58", linears: str = "I2_S", **options: Any
) -> tuple[Path, Decoder]:
    """A file and the model that it was made from."""
    sizes = SIZES if linears == "I2_S" else WIDE
    model = half_precision(tiny_transformer(**sizes | ARCHITECTURES[architecture] | options))
    tensors = tensors_of(model, architecture, linears)
    return write_gguf(file, metadata_of(model, architecture), tensors), model


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "TQ1_0", "TQ2_0"])
def test_types_against_the_gguf_package(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    data = np.random.default_rng(1).integers(0, 256, (8, TYPES[number].block_bytes), np.uint8)
    scale = slice(-2, None) if kind in ("Q6_K", "TQ1_0", "TQ2_0") else slice(0, 2)
    if kind == "Q4_K":
        # its offsets have a scale of their own
        data[:, 2:4] = np.linspace(0.03, 0.02, 8).astype("<f2").view(np.uint8).reshape(8, 2)
    data[:, scale] = np.linspace(0.01, 0.02, 8).astype("<f2").view(np.uint8).reshape(8, 2)
    want = gguf.quants.dequantize(data, number)
    if kind == "TQ1_0":
        # of bytes with values that no writer gives, only those that hold trits are compared
        data = gguf.quants.quantize(np.sign(want), number)
        want = gguf.quants.dequantize(data, number)
    got = dequantized(TYPES[number], data.reshape(-1), want.shape)
    assert np.array_equal(got.astype(np.float32), want)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0", "I2_S"])
@pytest.mark.parametrize("rows", [1, 5])
def test_trits(kind: str, rows: int) -> None:
    trits = np.random.default_rng(rows).integers(-1, 2, (rows, 512)).astype(np.float32)
    trits[0, :256] = 0
    number, shape, content = stored(kind, trits * 0.375)
    words = ternary_words(TYPES[number], np.frombuffer(content, np.uint8), shape)
    assert mx.array_equal(mx.array(words), pack_ternary(mx.array(trits)))


def biased_file(file: Path, model_type: str, **options: bool) -> tuple[Path, Decoder]:
    metadata = byte_level_metadata()
    # llama.cpp reads the types only as another kind of number than the stand-in writes
    del metadata["tokenizer.ggml.token_type"]
    vocabulary = len(metadata["tokenizer.ggml.tokens"])
    sizes = SIZES | {"vocab_size": vocabulary, "linears": None}
    model = tiny_transformer(model_type, **sizes, **options)
    mx.random.seed(4)
    for module in model.modules():
        if "bias" in module:
            module.bias = mx.random.normal(module.bias.shape)
    metadata |= metadata_of(model, model_type)
    return write_gguf(file, metadata, tensors_of(model, model_type, "F32", "F32")), model


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_biases(tmp_path: Path, model_type: str, options: dict[str, bool]) -> None:
    file, model = biased_file(tmp_path / "m.gguf", model_type, **options)
    loaded = load_model(file)
    assert (loaded.config.attention_bias, loaded.config.mlp_bias) == (
        options.get("attention_bias", False),
        options.get("mlp_bias", False),
    )
    assert relative_error(logits(loaded), logits(model)) <= TOLERANCE[mx.float32]
    plain, _ = biased_file(tmp_path / "plain.gguf", model_type)
    assert not (load_model(plain).config.attention_bias or load_model(plain).config.mlp_bias)


def test_biases_that_are_left_out_are_zero(tmp_path: Path) -> None:
    """Biases of queries, keys and values alone, like Qwen2 in the names of Llama."""
    file, model = biased_file(tmp_path / "m.gguf", "llama", attention_bias=True)
    tensors = tensors_of(model, "llama", "F32", "F32")
    others = {name: t for name, t in tensors.items() if not name.endswith("attn_output.bias")}
    write_gguf(file, metadata_of(model, "llama") | byte_level_metadata(), others)
    for block in model.blocks:
        block.token_mixer.output_proj.bias = mx.zeros_like(block.token_mixer.output_proj.bias)
    assert relative_error(logits(load_model(file)), logits(model)) <= TOLERANCE[mx.float32]


@pytest.mark.interop
@pytest.mark.parametrize(("attention_bias", "mlp_bias"), [(True, False), (True, True)])
def test_biases_in_llama_cpp(tmp_path: Path, attention_bias: bool, mlp_bias: bool) -> None:
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="needs llama-cpp-python, which pip compiles for some minutes"
    )
    file, _ = biased_file(
        tmp_path / "m.gguf", "llama", attention_bias=attention_bias, mlp_bias=mlp_bias
    )
    theirs = llama_cpp.Llama(str(file), n_ctx=16, logits_all=True, verbose=False)
    theirs.eval(TOKENS.tolist()[0])
    want = mx.array(np.array(theirs.scores[: TOKENS.shape[1]]))
    assert relative_error(load_model(file)(TOKENS)[0][0], want) <= 0.01


def test_a_vocabulary_may_have_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    model = tiny_transformer(**SIZES | {"vocab_size": 600})
    metadata = metadata_of(model, "llama") | sentencepiece_metadata()
    file = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, "llama", "I2_S"))
    loaded, tokenizer = load(file)
    assert (loaded.vocab_size, tokenizer.vocab_size) == (600, 640)
    with pytest.raises(ValueError, match="within the model's vocabulary, 0 to 599"):
        generate(loaded, tokenizer, [5, 600])
    assert generate(loaded, tokenizer, [5, 9], max_tokens=3) is not None


def test_keys_that_llama_cpp_needs(tmp_path: Path) -> None:
    file, model = tiny_file(tmp_path / "m.gguf")
    for key in ("attention.layer_norm_rms_epsilon", "context_length"):
        metadata = metadata_of(model, "bitnet-b1.58")
        del metadata[f"bitnet-b1.58.{key}"]
        write_gguf(file, metadata, tensors_of(model, "bitnet-b1.58", "I2_S"))
        with pytest.raises(CheckpointError, match=f"'bitnet-b1.58.{key}' must be given"):
            load_model(file)


def test_keys_that_may_be_absent_are_as_in_llama_cpp(tmp_path: Path) -> None:
    """Heads that share the dims, and the usual base of the rotation, in every architecture."""
    for architecture, model_type in (("bitnet-b1.58", "bitnet"), ("qwen3", "qwen3")):
        model = tiny_transformer(model_type, **SIZES | {"num_key_value_heads": 4})
        metadata = metadata_of(model, architecture)
        for key in ("attention.head_count_kv", "attention.key_length", "rope.freq_base"):
            del metadata[f"{architecture}.{key}"]
        del metadata[f"{architecture}.attention.value_length"]
        file = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, architecture, "I2_S"))
        config = load_model(file).config
        assert (config.num_key_value_heads, config.head_dim) == (4, 32)
        assert config.rotation.theta == 10000.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_i2_s(tmp_path: Path, architecture: str) -> None:
    file, model = tiny_file(tmp_path / "m.gguf", architecture)
    loaded = load_model(file, dtype=mx.float32)
    assert sum(isinstance(m, PackedBitLinear) for m in loaded.modules()) == 14
    pack_linears(model)
    for ours, theirs in zip(model.blocks, loaded.blocks, strict=True):
        query = ours.token_mixer.query_proj
        assert mx.array_equal(query.weight, theirs.token_mixer.query_proj.weight)
        assert mx.array_equal(query.scale, theirs.token_mixer.query_proj.scale)
    assert mx.array_equal(logits(loaded), logits(model))


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
@pytest.mark.parametrize("architecture", ["bitnet", "bitnet-b1.58"])
def test_tq_of_bitnet(tmp_path: Path, architecture: str, kind: str) -> None:
    file, model = tiny_file(tmp_path / "m.gguf", architecture, kind)
    loaded = load_model(file, dtype=mx.float32)
    for path, module in pack_linears(model).named_modules():
        if isinstance(module, PackedBitLinear):
            twin = dict(loaded.named_modules())[path]
            assert mx.array_equal(module.weight, twin.weight)
            # the file holds the scale as float16
            assert mx.array_equal(module.scale.astype(mx.float16), twin.scale)
            module.scale = twin.scale
    assert mx.array_equal(logits(loaded), logits(model))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0", "F16", "BF16", "F32"])
def test_dense_llama(tmp_path: Path, kind: str) -> None:
    model = half_precision(tiny_transformer(**WIDE, linears=None))
    for _, module in model.named_modules():
        if "weight" in module and module.weight.ndim == 2 and module is not model.embed:
            # two blocks of rows and two scales, which all of these types hold
            signs = mx.clip(mx.round(module.weight * 10), -1, 1)
            rows = mx.arange(len(signs))[:, None] < len(signs) // 2
            module.weight = signs * mx.where(rows, 0.25, 0.125)
    file = write_gguf(
        tmp_path / "m.gguf", metadata_of(model, "llama"), tensors_of(model, "llama", kind)
    )
    loaded = load_model(file, dtype=mx.float32)
    kinds = [type(module) for module in loaded.modules()]
    assert kinds.count(PackedLinear) == 15
    assert relative_error(logits(loaded), logits(model)) <= TOLERANCE[mx.float32]


def test_dense_qwen3(tmp_path: Path) -> None:
    model = half_precision(tiny_transformer("qwen3", linears=None, **SIZES))
    metadata = metadata_of(model, "qwen3")
    file = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, "qwen3", "F32"))
    assert mx.array_equal(logits(load_model(file, dtype=mx.float32)), logits(model))


@pytest.mark.parametrize("kind", [{}, {"llama.rope.scaling.type": "linear"}], ids=str)
def test_stretched_positions(tmp_path: Path, kind: dict[str, str]) -> None:
    rotation = Rotation(scaling="linear", factor=4.0)
    model = half_precision(tiny_transformer(**SIZES, rotation=rotation))
    metadata = metadata_of(model, "llama") | kind | {"llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, "llama", "I2_S"))
    loaded = load_model(file, dtype=mx.float32)
    assert loaded.config.rotation == rotation
    assert mx.array_equal(logits(loaded), logits(pack_linears(model)))


def test_factors_of_longrope(tmp_path: Path) -> None:
    factors = tuple(1.0 + 0.125 * n for n in range(16))
    rotation = Rotation(scaling="longrope", trained_length=2048, factors=factors)
    model = half_precision(tiny_transformer(**SIZES, rotation=rotation))
    metadata = metadata_of(model, "llama") | {"llama.rope.scaling.type": "longrope"}
    tensors = tensors_of(model, "llama", "I2_S")
    listed = stored("F32", mx.array(factors))
    both = {f"rope_factors_{name}.weight": listed for name in ("short", "long")}
    loaded = load_model(write_gguf(tmp_path / "m.gguf", metadata, tensors | both), dtype=mx.float32)
    assert loaded.config.rotation == rotation
    assert mx.array_equal(logits(loaded), logits(pack_linears(model)))
    other = both | {"rope_factors_long.weight": stored("F32", 2 * mx.array(factors))}
    file = write_gguf(tmp_path / "m.gguf", metadata, tensors | other)
    with pytest.raises(UnsupportedModelError, match="'long_factor' must equal 'short_factor'"):
        load_model(file)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("architecture", "embedding", "dtype"),
    [
        ("bitnet-b1.58", "F16", mx.bfloat16),
        ("bitnet-b1.58", "F32", mx.float32),
        ("llama", "F16", mx.float16),
        ("llama", "BF16", mx.bfloat16),
        ("llama", "Q8_0", mx.float16),
        ("llama", "Q4_0", mx.float16),
    ],
)
def test_dtype(tmp_path: Path, architecture: str, embedding: str, dtype: mx.Dtype) -> None:
    model = tiny_transformer(**SIZES | ARCHITECTURES[architecture])
    tensors = tensors_of(model, architecture, "I2_S", embedding)
    file = write_gguf(tmp_path / "m.gguf", metadata_of(model, architecture), tensors)
    loaded = load_model(file)
    assert loaded.dtype == logits(loaded).dtype == dtype
    # what the file holds in float32 stays so, unless a dtype is asked for
    assert loaded.norm.weight.dtype == mx.float32
    nbytes = sum(array.nbytes for array in parameters(loaded).values())
    assert needed_bytes(open_checkpoint(file)) == nbytes
    convert(open_checkpoint(file), tmp_path / "converted")
    again = load_model(tmp_path / "converted")
    assert mx.array_equal(logits(again), logits(loaded))
    cast = load_model(file, dtype=dtype)
    assert cast.norm.weight.dtype == logits(cast).dtype == dtype
    raw = np.frombuffer(tensors["token_embd.weight"][2], np.uint8).reshape(
        len(model.embed.weight), -1
    )
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[embedding])
    assert mx.array_equal(load_model(file, dtype=mx.float32).embed.weight, mx.array(want))


def test_file_of_the_gguf_package(tmp_path: Path) -> None:
    model = half_precision(tiny_transformer("bitnet", tie_word_embeddings=True, **WIDE))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bitnet-b1.58")
    for key, value in metadata_of(model, "bitnet-b1.58").items():
        if key.startswith("bitnet"):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(key, value)
    vocabulary = byte_level_metadata()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(vocabulary["tokenizer.ggml.tokens"])
    writer.add_token_types(vocabulary["tokenizer.ggml.token_type"])
    writer.add_token_merges(vocabulary["tokenizer.ggml.merges"])
    for name, (kind, shape, content) in tensors_of(model, "bitnet-b1.58", "TQ2_0").items():
        raw = np.frombuffer(content, np.uint8)
        numbers = {0: np.float32, 1: np.float16}
        if kind in numbers:
            writer.add_tensor(name, raw.view(numbers[kind]).reshape(shape))
        else:
            rows = raw.reshape(shape[0], -1)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    own = write_gguf(
        tmp_path / "own.gguf",
        metadata_of(model, "bitnet-b1.58"),
        tensors_of(model, "bitnet-b1.58", "TQ2_0"),
    )
    assert mx.array_equal(logits(load_model(tmp_path / "m.gguf")), logits(load_model(own)))
    assert load_tokenizer(tmp_path / "m.gguf").encode("Hello", add_special_tokens=False)


class TestVocabulary:
    @pytest.fixture(params=["tokenizer_bpe", "tokenizer_spm"])
    def case(self, request: pytest.FixtureRequest) -> tuple[dict[str, Any], Path]:
        metadata = byte_level_metadata() if "bpe" in request.param else sentencepiece_metadata()
        return metadata, GOLDENS / request.param

    def test_equals_the_original(self, tmp_path: Path, case: tuple[dict[str, Any], Path]) -> None:
        metadata, folder = case
        model = tiny_transformer("bitnet", **SIZES | {"vocab_size": 700})
        tensors = tensors_of(model, "bitnet-b1.58", "I2_S")
        metadata = metadata_of(model, "bitnet-b1.58") | metadata
        file = write_gguf(tmp_path / "m.gguf", metadata, tensors)
        _, tokenizer = load(file)
        copy = tmp_path / "original"
        shutil.copytree(folder, copy)
        config = json.loads((copy / "tokenizer_config.json").read_text())
        # llama.cpp puts a space after special tokens too
        (copy / "tokenizer_config.json").write_text(json.dumps(config | {"legacy": True}))
        original = load_tokenizer(copy)
        assert tokenizer.vocab_size == original.vocab_size
        assert tokenizer.bos_token_id == original.bos_token_id
        assert tokenizer.eos_token_ids >= original.eos_token_ids
        reference = json.loads((folder / "tokenizer_golden.json").read_text())
        for item in reference["items"]:
            assert tokenizer.encode(item["text"]) == original.encode(item["text"])
            assert tokenizer.decode(item["ids"]) == item["decoded"]
        for chat in reference["chat"]:
            arguments = chat["messages"], chat["add_generation_prompt"]
            assert tokenizer.apply_chat_template(*arguments) == original.apply_chat_template(
                *arguments
            )

    def test_combining_marks_belong_to_words_of_qwen_3_5(self, tmp_path: Path) -> None:
        """By its own pattern; Qwen 2's parts a letter from a mark that it has no composed form with."""
        found = {}
        for pre in ("qwen2", "qwen35"):
            files = files_of_metadata(byte_level_metadata(pre=pre))
            tokenizer = json.loads(files["tokenizer.json"])
            assert tokenizer["normalizer"] == {"type": "NFC"}
            split = tokenizer["pre_tokenizer"]["pretokenizers"][0]
            found[pre] = split["pattern"]["Regex"]
            for name, data in files.items():
                (tmp_path / name).write_bytes(data)
            opened = load_tokenizer(tmp_path)
            assert opened.decode(opened.encode("x\u0323y, z\u0301")).endswith("x\u0323y, \u017a")
        assert found["qwen35"] == (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        assert found["qwen2"] != found["qwen35"]

    def test_kind_that_the_writer_left_out(self, tmp_path: Path) -> None:
        file, _ = tiny_file(tmp_path / "m.gguf")
        metadata = byte_level_metadata(pre=None)
        write_gguf(
            file,
            metadata_of(tiny_transformer("bitnet", **SIZES), "bitnet-25") | metadata,
            {"token_embd.weight": stored("F32", mx.zeros((700, 128)))},
        )
        assert load_tokenizer(file).encode("a")[0] == metadata["tokenizer.ggml.bos_token_id"]

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("pre", "falcon", "'tokenizer.ggml.pre' must be one of llama3"),
            ("model", "bert", "'tokenizer.ggml.model' must be gpt2 or llama"),
            ("tokens", 3, "'tokenizer.ggml.tokens' must be a list"),
            ("token_type", [1, 2], "must have one entry for each of 518 tokens but has 2"),
            ("merges", ["a b c"], "must join pairs of tokens"),
            ("merges", ["q absent"], "must join pairs of tokens"),
            ("add_bos_token", 1, "must be true or false"),
        ],
    )
    def test_refused(self, tmp_path: Path, key: str, value: Any, message: str) -> None:
        metadata = byte_level_metadata() | {f"tokenizer.ggml.{key}": value}
        _, model = tiny_file(tmp_path / "m.gguf")
        metadata |= metadata_of(model, "bitnet-25")
        file = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, "bitnet-25", "I2_S"))
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
            load_tokenizer(file)
        assert "\n" not in str(caught.value)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((GOLDENS / "tokenizer_bpe" / name).read_bytes())
        assert load_tokenizer(tmp_path).encode("a")


@pytest.mark.parametrize("read", [load, load_tokenizer])
def test_messages_name_the_file(tmp_path: Path, read: Any) -> None:
    file, model = tiny_file(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="must hold a vocabulary but has none") as caught:
        read(file)
    assert f"'{file}'" in str(caught.value) and f"'{tmp_path}'" in str(caught.value)
    for key, value in (("tokenizer.chat_template", 3), ("tokenizer.chat_template.tool_use", True)):
        metadata = byte_level_metadata() | metadata_of(model, "bitnet-25") | {key: value}
        write_gguf(file, metadata, tensors_of(model, "bitnet-25", "I2_S"))
        with pytest.raises(CheckpointError, match="'chat_template' must be a text") as caught:
            load_tokenizer(file)
        assert f"'{file}'" in str(caught.value) and "scratch" not in str(caught.value)


def test_a_tokenizer_beside_a_file_without_a_vocabulary(tmp_path: Path) -> None:
    file, _ = tiny_file(tmp_path / "m.gguf", vocab_size=640)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(GOLDENS / "tokenizer_spm" / name, tmp_path / name)
    want = load_tokenizer(GOLDENS / "tokenizer_spm").encode("a</s>b", parse_special=True)
    assert load_tokenizer(file).encode("a</s>b", parse_special=True) == want
    assert load(file)[1].encode("a</s>b", parse_special=True) == want


def test_folder_with_one_file(tmp_path: Path) -> None:
    file, _ = tiny_file(tmp_path / "a.gguf")
    want = logits(load_model(file))
    assert mx.array_equal(logits(load_model(tmp_path)), want)
    (tmp_path / "b.gguf").write_bytes(file.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"must hold one .gguf file but holds 2: a\.gguf, b\."
    ):
        load_model(tmp_path)


def test_saves_as_a_folder(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    model = tiny_transformer("bitnet", **SIZES | {"vocab_size": 700})
    tensors = tensors_of(model, "bitnet-b1.58", "I2_S")
    file = write_gguf(tmp_path / "m.gguf", metadata_of(model, "bitnet-b1.58") | metadata, tensors)
    loaded, tokenizer = load(file)
    save_model(tmp_path / "saved", loaded, tokenizer)
    again, same = load(tmp_path / "saved")
    assert mx.array_equal(logits(again), logits(loaded))
    assert same.encode("Hello world") == tokenizer.encode("Hello world")
    assert same.eos_token_ids == tokenizer.eos_token_ids


class TestRefused:
    def check(self, tmp_path: Path, message: str, **changes: Any) -> None:
        """Changes of metadata, or of tensors whose names hold `weight`; `__` stands for a dot."""
        _, model = tiny_file(tmp_path / "m.gguf")
        named = {key.replace("__", "."): value for key, value in changes.items()}
        tensors = tensors_of(model, "bitnet-b1.58", "I2_S")
        metadata = metadata_of(model, "bitnet-b1.58")
        for key, value in named.items():
            (tensors if "weight" in key else metadata)[key] = value
        present = {key: value for key, value in tensors.items() if value is not None}
        given = {key: value for key, value in metadata.items() if value is not None}
        file = write_gguf(tmp_path / "m.gguf", given, present)
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
            load_model(file)
        assert "\n" not in str(caught.value)

    def test_entries(self, tmp_path: Path) -> None:
        prefix = "bitnet-b1.58."
        for key, value, message in [
            (
                "general.architecture",
                "gemma3",
                "must be one of bitnet, bitnet-25, bitnet-b1.58, llama, maple, minicpm, qwen3, "
                "qwen35, qwen3moe but",
            ),
            ("split.count", 3, "must be named as one of the 3 parts of its model"),
            (f"{prefix}attention.sliding_window", 512, "sliding_window' must be absent"),
            (f"{prefix}rope.scaling.type", "su", "must be none or linear or yarn or longrope"),
            (f"{prefix}rope.scaling.type", "longrope", "factors_short.weight' .* but holds none"),
            (
                f"{prefix}rope.scaling.attn_factor",
                2.0,
                "must be yarn for 'rope.scaling.attn_factor'",
            ),
            (f"{prefix}rope.scaling.yarn_log_multiplier", 0.1, "log_multiplier' must be absent"),
            (f"{prefix}voS*\nEsize", 1, r"voS\*\\nEsize' must be absent"),
            (f"{prefix}rope.dimension_count", 16, "dimension_count' must be 32 but got 16"),
            (f"{prefix}attention.head_count", [4, 8], "one positive number for all blocks"),
            (f"{prefix}block_count", None, "block_count' must be given but is missing"),
            (f"{prefix}feed_forward_length", 0, "'intermediate_size' must be a whole number"),
            ("general.alignment", 12, "impossible alignment"),
        ]:
            self.check(tmp_path, message, **{key: value})

    def test_tensors(self, tmp_path: Path) -> None:
        linear = mx.ones((128, 128))
        wrong_code = i2_s(np.ones((128, 128), np.float32))
        wrong_code = b"\xc0" + wrong_code[1:]
        negative = i2_s(np.ones((128, 128)))[:-32] + np.full(8, -1, np.float32).tobytes()
        for name, tensor, message in [
            (
                "rope_freqs.weight",
                stored("F32", mx.ones((8,))),
                "'short_factor' must hold 16 numbers",
            ),
            (
                "rope_freqs.weight",
                stored("F32", mx.ones((4, 16))),
                "'rope_freqs.weight' must be a list of at most 2048 numbers",
            ),
            (
                "rope_factors_long.weight",
                stored("F32", mx.ones((16,))),
                "must hold 'rope_freqs.weight' .* but holds 'rope_factors_long.weight'",
            ),
            (
                "blk.0.attn_q.weight",
                stored("F16", linear),
                "must be stored as I2_S, TQ1_0, TQ2_0 or Q2_0",
            ),
            ("blk.0.attn_q.weight", (13, (128, 256), bytes(99999)), r"stored as type 13 \(Q5_K\)"),
            ("blk.0.attn_q.weight", (99, (128, 128), b""), "stored as type 99. Use a file"),
            ("blk.0.attn_q.weight", (36, (128, 64), bytes(2080)), "takes a multiple of 128"),
            ("blk.0.attn_q.weight", (36, (128, 128), wrong_code), "must hold ternary codes"),
            ("blk.0.attn_q.weight", (36, (128, 128), negative), "must be positive"),
            ("blk.0.attn_q.weight", (36, (64, 128), bytes(2080)), r"must have shape \(128, 8\)"),
            ("blk.1.attn_q.weight", None, "lacks tensors .*layers.1.self_attn.q_proj.weight"),
            ("token_embd.weight", None, "must hold the matrix 'token_embd.weight'"),
        ]:
            self.check(tmp_path, message, **{name: tensor})

    def test_scales_that_differ(self, tmp_path: Path) -> None:
        file, model = tiny_file(tmp_path / "m.gguf", "bitnet", "TQ2_0")
        tensors = tensors_of(model, "bitnet", "TQ2_0")
        scales = np.where(np.arange(256) < 128, 0.5, 0.25)[:, None]
        tensors["blk.0.attn_q.weight"] = stored("TQ2_0", scales * np.ones((256, 256)))
        write_gguf(file, metadata_of(model, "bitnet"), tensors)
        with pytest.raises(
            UnsupportedModelError, match="must have one scale in all its blocks but"
        ):
            load_model(file)

    @pytest.mark.parametrize("version", [1, 4, 3 << 24])
    def test_versions(self, tmp_path: Path, version: int) -> None:
        file = write_gguf(tmp_path / "m.gguf", {}, {}, version)
        with pytest.raises(UnsupportedModelError, match="must be of version 2 or 3"):
            load_model(file)

    def test_truncation(self, tmp_path: Path) -> None:
        file, _ = tiny_file(tmp_path / "m.gguf")
        content = file.read_bytes()
        for size in (0, 3, 20, 100, 1000, len(content) // 2, len(content) - 40):
            file.write_bytes(content[:size])
            with pytest.raises(CheckpointError, match=r"\[GGUF\] .*ends"):
                load_model(file)

    def test_lists_that_would_fill_the_memory(self, tmp_path: Path) -> None:
        file = tmp_path / "m.gguf"
        count = 5_000_000
        entry = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 1, count)
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(count))
        tracemalloc.start()
        with pytest.raises(CheckpointError, match="more than 4,000,000 values"):
            open_checkpoint(file)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()

    def test_pipes(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "m.gguf")
        with pytest.raises(CheckpointError, match="it is a pipe"):
            read_gguf(tmp_path / "m.gguf")
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path)

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGML" + bytes(100))
        with pytest.raises(CheckpointError, match="must begin with 'GGUF'"):
            open_checkpoint(tmp_path / "m.gguf")
        with pytest.raises(CheckpointError, match="'revision' must be left out"):
            open_checkpoint(tmp_path / "m.gguf", "main")


def test_latent_answer(tmp_path: Path) -> None:
    model = half_precision(tiny_transformer(**SIZES, linears=None))
    file = write_gguf(
        tmp_path / "m.gguf", metadata_of(model, "llama"), tensors_of(model, "llama", "F32")
    )
    assert mx.array_equal(logits(load_model(file, dtype=mx.float32)), logits(model))
    masters = load_model(file, latent=True)
    assert sum(isinstance(m, PackedBitLinear) for m in masters.modules()) == 14


class TestDownload:
    @pytest.fixture
    def hub(self, tmp_path: Path) -> Iterator[HubServer]:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            tiny_file(tmp_path / name / "ggml-model-i2_s.gguf")
            (tmp_path / name / "README.md").write_text("not wanted")
        tiny_file(tmp_path / "two" / "f16.gguf")
        with HubServer({"me/one": tmp_path / "one", "me/two": tmp_path / "two"}) as server:
            yield server

    def test_repositories(self, hub: HubServer, tmp_path: Path) -> None:
        with HubClient(hub.url, tmp_path / "home") as client:
            want = client.call("logits", str(tmp_path / "one"))
            for _ in range(2):
                assert client.call("logits", "me/one") == want
                assert hub.downloaded() == ["ggml-model-i2_s.gguf"]
            with pytest.raises(MMFreeError, match=r"holds 2: .* Give one as 'me/two/f16.gguf'"):
                client.call("logits", "me/two")
            assert client.call("logits", "me/two/f16.gguf") == want
            assert hub.downloaded() == ["ggml-model-i2_s.gguf", "f16.gguf"]
