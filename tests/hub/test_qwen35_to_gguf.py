"""GGUF files of Qwen3.5, with and without a rotation: read back, verified, and opened by llama.cpp."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.files.gguf_file import read_gguf
from mlx_mmfree.hub import Checkpoint, convert, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint import gguf_config
from mlx_mmfree.hub.checkpoint.formats.hadamard import MARK
from mlx_mmfree.hub.checkpoint.parameter_reader import ParameterReader
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.hub.conversion.verify import verify
from mlx_mmfree.hub.publish.runtimes import opening
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.rotated import RotatedLinear
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.tokenizer.from_gguf import BYTE_LEVEL_PATTERNS
from tests.hub.gguf_files import TYPE_NUMBERS, stored, write_gguf
from tests.hub.test_gguf_q2_0 import assert_texts_are_those_of_llama_cpp
from tests.tolerances import TOLERANCE, relative_error

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
QWEN35 = find("qwen3_5_text")
PUBLISHED = 2e-4
"""The largest allowed difference of logits of published formats."""


def write_tokenizer(folder: Path) -> None:
    """A vocabulary for models with few tokens, which splits texts as Qwen3.5's does."""
    [pattern] = [pattern for pattern, name in BYTE_LEVEL_PATTERNS.items() if name == "qwen35"]
    merges = [("t", "h"), ("h", "e"), ("i", "n"), ("e", "r")]
    tokens = [*"abcdefghijklmnopqrstuvwxyz\u0120.,!?", *map("".join, merges)]
    made = Tokenizer(BPE({text: number for number, text in enumerate(tokens)}, merges))
    split = Split(Regex(pattern), "isolated")
    made.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


def with_tokenizer(path: Path, folder: Path) -> Checkpoint:
    """A checkpoint without a tokenizer, with one."""
    checkpoint = open_checkpoint(str(path))
    shutil.copytree(checkpoint.folder, folder)
    folder.chmod(0o755)
    write_tokenizer(folder)
    return replace(checkpoint, folder=folder)


def source(folder: Path, **sizes: Any) -> Checkpoint:
    """A model with random weights."""
    mx.random.seed(3)
    config = QWEN35.config.from_hub({**QWEN35.tiny, "initializer_range": 0.1, **sizes})
    model = QWEN35.build(config)
    for block in model.blocks:
        for norm in (block.token_norm, block.channel_norm):
            norm.weight = 1 + 0.3 * mx.random.normal(norm.weight.shape)
    save_model(folder, model)
    write_tokenizer(folder)
    return open_checkpoint(folder)


def written(folder: Path) -> Path:
    [file] = folder.glob("*.gguf")
    return file


def rotated(model: Decoder) -> dict[str, RotatedLinear]:
    return {p: each for p, each in matrices(model).items() if isinstance(each, RotatedLinear)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen35_hub", "BF16"),
        ("qwen35_text_leftpad_bf16", "BF16"),
        ("qwen35_train", "F32"),
        ("mlx_qwen35_2bit_g128", "Q2_0"),
        ("prism_schema1", "PQ2_0"),
        ("prism_schema2", "PQ2_0"),
        ("gguf_qwen35_q2_0/model.gguf", "Q2_0"),
        ("gguf_qwen35_pq2_0_rotated/model.gguf", "PQ2_0"),
        ("gguf_qwen35_ptq1_0_rotated/model.gguf", "PQ2_0"),
    ],
)
def test_published_formats_come_back(tmp_path: Path, name: str, kind: str) -> None:
    checkpoint = with_tokenizer(GOLDENS / name, tmp_path / "s")
    report = convert(checkpoint, tmp_path / "m", to="gguf")
    file = written(tmp_path / "m")
    assert file.name == f"m-{kind}.gguf"
    golden = mx.load(str(GOLDENS / name.partition("/")[0] / "golden.safetensors"))
    model = load_model(file, dtype=mx.float32)
    assert mx.abs(model(golden["input_ids"])[0] - golden["logits"]).max().item() <= PUBLISHED
    want = rotated(load_model(checkpoint))
    got = rotated(model)
    assert want.keys() == got.keys() and bool(got) == (kind == "PQ2_0")
    assert all(mx.array_equal(want[path].weight, got[path].weight) for path in got)
    linear = model.config.linear_key_head_dim, model.config.linear_value_head_dim
    in_llama_cpp = opening(report.openings, "llama.cpp")
    assert in_llama_cpp is not None
    assert in_llama_cpp.opens == (kind != "PQ2_0" and linear[0] == linear[1])
    # of gains, 16 bits would lose some
    usual = load_model(file)
    assert mx.array_equal(usual.blocks[0].token_norm.weight, model.blocks[0].token_norm.weight)


@pytest.mark.parametrize("name", ["prism_schema1", "gguf_qwen35_pq2_0_rotated/model.gguf"])
def test_a_rotation_is_undone_where_that_is_asked(tmp_path: Path, name: str) -> None:
    checkpoint = with_tokenizer(GOLDENS / name, tmp_path / "s")
    formats = FloatFormats(mx.float32, unrotate="dense")
    report = convert(checkpoint, tmp_path / "m", to="gguf", formats=formats)
    metadata, _ = read_gguf(written(tmp_path / "m"))
    assert not any(key.startswith(MARK) for key in metadata)
    assert report.logits_difference is not None and report.logits_difference <= 1e-5
    assert not rotated(load_model(written(tmp_path / "m")))


def tied(folder: Path) -> Checkpoint:
    """Rotated weights whose embedding is the head."""
    checkpoint = with_tokenizer(GOLDENS / "prism_schema1", folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["modules"] = [each for each in config["modules"] if each["path"] != "lm_head"]
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    file.chmod(0o644)
    file.write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    others = {n: array for n, array in mx.load(str(weights)).items() if not n.startswith("lm_head")}
    mx.eval(others)
    weights.unlink()
    mx.save_safetensors(str(weights), others)
    del checkpoint
    return open_checkpoint(folder)


def test_a_tied_head_is_version_2(tmp_path: Path) -> None:
    checkpoint = tied(tmp_path / "s")
    convert(checkpoint, tmp_path / "m", to="gguf")
    metadata, stored = read_gguf(written(tmp_path / "m"))
    assert (metadata[f"{MARK}version"], metadata[f"{MARK}tied_output"]) == (2, True)
    assert metadata[f"{MARK}inverse_weight_names"] == ["token_embd.weight"]
    assert "output.weight" not in stored
    tokens = mx.array([[1, 5, 9, 2]])
    want, got = (load_model(each, dtype=mx.float32) for each in (checkpoint, tmp_path / "m"))
    assert relative_error(got(tokens)[0], want(tokens)[0]) <= TOLERANCE[mx.float32]


def test_heads_of_values_go_there_and_back(tmp_path: Path) -> None:
    """Of two keys with three values each, the two orders are not each other's inverse."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    checkpoint = source(tmp_path / "s", **sizes)
    convert(checkpoint, tmp_path / "m", to="gguf")
    tokens = mx.array([[1, 5, 9, 2]])
    want, got = (load_model(each)(tokens)[0] for each in (checkpoint, tmp_path / "m"))
    assert relative_error(got, want) <= TOLERANCE[mx.float32]


def flip_a_code(file: Path, data: bytearray, name: str = "blk.0.ssm_out.weight") -> None:
    _, stored = read_gguf(file)
    data[stored[name].start + 5] ^= 1


def double_a_scale(file: Path, data: bytearray) -> None:
    _, stored = read_gguf(file)
    start = stored["blk.0.ffn_up.weight"].start
    scale = np.frombuffer(bytes(data[start : start + 2]), "<f2") * np.float16(2)
    data[start : start + 2] = scale.tobytes()


def swap_heads(file: Path, data: bytearray) -> None:
    _, stored = read_gguf(file)
    tensor = stored["blk.0.ssm_a"]
    first, last = data[tensor.start : tensor.start + 4], data[tensor.stop - 4 : tensor.stop]
    data[tensor.start : tensor.start + 4], data[tensor.stop - 4 : tensor.stop] = last, first


def take_one_from_a_gain(file: Path, data: bytearray) -> None:
    _, stored = read_gguf(file)
    tensor = stored["blk.0.attn_norm.weight"]
    gain = np.frombuffer(bytes(data[tensor.start : tensor.stop]), "<f4") - np.float32(1)
    data[tensor.start : tensor.stop] = gain.tobytes()


def flip_a_sign(file: Path, data: bytearray) -> None:
    key = f"{MARK}sign_values".encode()
    offset = data.index(key) + len(key) + 16
    sign = int.from_bytes(data[offset : offset + 4], "little", signed=True)
    data[offset : offset + 4] = (-sign).to_bytes(4, "little", signed=True)


def halve_the_blocks(file: Path, data: bytearray) -> None:
    key = f"{MARK}block_size".encode()
    offset = data.index(key) + len(key) + 4
    block = int.from_bytes(data[offset : offset + 4], "little")
    data[offset : offset + 4] = (block // 2).to_bytes(4, "little")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "damage",
    [flip_a_code, double_a_scale, swap_heads, take_one_from_a_gain, flip_a_sign, halve_the_blocks],
)
def test_damage_is_found(tmp_path: Path, damage: Any) -> None:
    source = GOLDENS / "gguf_qwen35_pq2_0_rotated" / "model.gguf"
    checkpoint = with_tokenizer(source, tmp_path / "s")
    convert(checkpoint, tmp_path / "m", to="gguf", check=False)
    file = written(tmp_path / "m")
    reader = ParameterReader(checkpoint)
    verify(reader, ParameterReader(open_checkpoint(file)), FloatFormats())
    data = bytearray(file.read_bytes())
    damage(file, data)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\[verify\]"):
        verify(reader, ParameterReader(open_checkpoint(file)), FloatFormats())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gguf_type": "q2_0"}, "'gguf_type' must be pq2_0, which no program knows that would"),
        ({"formats": FloatFormats(unrotate=8)}, "'unrotate' must be dense for GGUF"),
    ],
)
def test_what_would_be_read_without_a_rotation(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    checkpoint = with_tokenizer(GOLDENS / "prism_schema1", tmp_path / "s")
    with pytest.raises(UnsupportedModelError, match=words):
        convert(checkpoint, tmp_path / "m", to="gguf", **options)
    assert not (tmp_path / "m").exists()


def test_signs_of_one_width_must_agree(tmp_path: Path) -> None:
    checkpoint = with_tokenizer(GOLDENS / "prism_schema1", tmp_path / "s")
    weights = checkpoint.folder / "model.safetensors"
    tensors = mx.load(str(weights))
    name = next(n for n in tensors if n.endswith("gate_proj.signs"))
    tensors[name] = -tensors[name]
    mx.eval(tensors)
    weights.unlink()
    mx.save_safetensors(str(weights), tensors)
    with pytest.raises(UnsupportedModelError, match="must be rotated by the same signs for GGUF"):
        convert(open_checkpoint(checkpoint.folder), tmp_path / "m", to="gguf")


@pytest.mark.parametrize("are_stored", [True, False])
def test_blocks_that_predict_further_tokens_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], are_stored: bool
) -> None:
    checkpoint = source(tmp_path / "s")
    convert(checkpoint, tmp_path / "m", to="gguf")
    file = written(tmp_path / "m")
    metadata, tensors = read_gguf(file)
    content = file.read_bytes()
    main_tensors = {
        name: (TYPE_NUMBERS[each.kind.name], each.shape, content[each.start : each.stop])
        for name, each in tensors.items()
    }
    again = {
        f"blk.2.{name[6:]}": each
        for name, each in main_tensors.items()
        if name.startswith("blk.1.")
    }
    again["blk.2.nextn.eh_proj.weight"] = stored("F32", np.ones((8, 16)))
    metadata |= {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    metadata = {name: value for name, value in metadata.items() if not name.startswith("tokenizer")}
    write_gguf(tmp_path / "x.gguf", metadata, {**main_tensors, **(again if are_stored else {})})
    model = load_model(tmp_path / "x.gguf", dtype=mx.float32)
    tokens = mx.array([[5, 7, 30, 9, 26]])
    assert mx.array_equal(model(tokens)[0], load_model(file, dtype=mx.float32)(tokens)[0])
    words = "also holds the prediction of several tokens at once"
    assert (words in capsys.readouterr().err) == are_stored


@pytest.mark.parametrize("count", [2, 9, -1, True])
def test_more_blocks_that_predict_than_blocks(tmp_path: Path, count: Any) -> None:
    convert(source(tmp_path / "s"), tmp_path / "m", to="gguf")
    metadata, _ = read_gguf(written(tmp_path / "m"))
    metadata |= {"qwen35.nextn_predict_layers": count}
    with pytest.raises(CheckpointError, match=r"must be less than 'qwen35\.block_count'"):
        gguf_config.hub_config(metadata, 8, is_tied=False)


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_a_head_is_tied_as_the_key_outside_says(outer: bool | None, inner: bool | None) -> None:
    key = "tie_word_embeddings"
    given = {key: inner} if inner is not None else {}
    config = {"text_config": {**QWEN35.tiny, **given}, **({} if outer is None else {key: outer})}
    want = bool(inner) if outer is None else outer
    assert QWEN35.config.from_hub(config).tie_word_embeddings == want


def test_layers_that_do_not_repeat_have_no_format(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    checkpoint = source(tmp_path / "s", num_hidden_layers=3, layer_types=kinds)
    with pytest.raises(UnsupportedModelError, match="does not write as GGUF"):
        convert(checkpoint, tmp_path / "m", to="gguf")


TERNARY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_key_head_dim": 64,
    "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
}


def test_ternary_linears_have_the_order_of_the_file(tmp_path: Path) -> None:
    checkpoint = source(tmp_path / "s", **TERNARY)
    convert(checkpoint, tmp_path / "m", to="gguf")
    file = written(tmp_path / "m")
    assert file.name == "m-TQ2_0.gguf"
    want, got = (load_model(each) for each in (checkpoint, file))
    eye = mx.eye(256)
    for ours, theirs in zip(want.blocks, got.blocks, strict=True):
        for name in ("qkv_proj", "gate_proj", "out_proj"):
            if name in ours.token_mixer:
                pair = matrices(ours.token_mixer)[name], matrices(theirs.token_mixer)[name]
                assert relative_error(pair[1].multiply(eye), pair[0].multiply(eye)) <= 1e-3
    with pytest.raises(UnsupportedModelError, match=r"bitnet\.cpp has no such architecture"):
        convert(checkpoint, tmp_path / "i", to="gguf", gguf_type="i2_s")


@pytest.mark.interop
@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("qwen35_hub", FloatFormats()),
        ("qwen35_train", FloatFormats()),
        ("gguf_qwen35_pq2_0_rotated/model.gguf", FloatFormats(mx.float32, unrotate="dense")),
    ],
    ids=str,
)
def test_texts_in_llama_cpp(tmp_path: Path, name: str, formats: FloatFormats) -> None:
    convert(
        with_tokenizer(GOLDENS / name, tmp_path / "s"), tmp_path / "m", to="gguf", formats=formats
    )
    file = written(tmp_path / "m")
    assert_texts_are_those_of_llama_cpp(file, load_model(file, dtype=mx.float32), [5, 7, 30, 9, 26])


@pytest.mark.interop
@pytest.mark.parametrize("heads", [(2, 2), (2, 6), (4, 8)])
def test_heads_of_values_in_llama_cpp(tmp_path: Path, heads: tuple[int, int]) -> None:
    keys, values = heads
    checkpoint = source(
        tmp_path / "s",
        num_hidden_layers=4,
        layer_types=None,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
    )
    convert(checkpoint, tmp_path / "m", to="gguf")
    assert_texts_are_those_of_llama_cpp(
        written(tmp_path / "m"), load_model(checkpoint), [5, 7, 30, 9, 26, 1, 2]
    )


@pytest.mark.interop
def test_ternary_weights_in_llama_cpp(tmp_path: Path) -> None:
    sizes = {key: size for key, size in TERNARY.items() if key != "quantization_config"}
    dense = source(tmp_path / "s", **sizes)
    formats = FloatFormats(mx.float16, ternarize_groups=True)
    convert(dense, tmp_path / "affine", formats=formats, check=False)
    convert(open_checkpoint(tmp_path / "affine"), tmp_path / "m", to="gguf")
    file = written(tmp_path / "m")
    assert file.name == "m-Q2_0.gguf"
    assert_texts_are_those_of_llama_cpp(file, load_model(file, dtype=mx.float32), [5, 7, 30, 9, 34])


@pytest.mark.interop
@pytest.mark.parametrize("name", ["prism_schema1", "mlx_qwen35_2bit_g128"])
def test_what_llama_cpp_refuses(tmp_path: Path, name: str) -> None:
    """Rotated weights by their type, and keys that are not as wide as values."""
    llama_cpp = pytest.importorskip("llama_cpp")
    convert(with_tokenizer(GOLDENS / name, tmp_path / "s"), tmp_path / "m", to="gguf")
    with pytest.raises(ValueError, match="Failed to load model"):
        llama_cpp.Llama(str(written(tmp_path / "m")), verbose=False)
