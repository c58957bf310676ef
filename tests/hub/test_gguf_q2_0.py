"""Q2_0 of llama.cpp and its forms in PrismML's files: 2-bit codes with a scale for 64 or 128 inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.files import gguf_blocks
from mlx_mmfree.files.gguf_blocks import Q2_0, TYPES, affine_scales, dequantized
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.models import Decoder
from mlx_mmfree.ops import ternarize
from tests.hub.checkpoints import GOLDENS, TOKENS, tiny_transformer
from tests.hub.gguf_files import Stored, metadata_of, tensors_of, with_pairs_together, write_gguf
from tests.tolerances import TOLERANCE, relative_error

SIZES: dict[str, Any] = {
    "vocab_size": 520,
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "initializer_range": 0.1,
}
PRISM, LEGACY = 142, 42


def q2_0(values: np.ndarray, group: int) -> tuple[bytes, np.ndarray]:
    """From the definition: a float16 scale d, then the code of value j at bits `2 (j % 4)` of byte
    `j / 4`; codes 0 to 3 stand for -d, 0, d and 2d. Returns the bytes and what they stand for."""
    content, stood = b"", []
    for block in values.reshape(-1, group):
        d = np.float16(np.abs(block).max())
        codes = [round(float(value) / float(d)) + 1 if d else 1 for value in block]
        packed = [sum(codes[j + k] << 2 * k for k in range(4)) for j in range(0, group, 4)]
        content += d.tobytes() + bytes(packed)
        stood.append((np.array(codes, np.float32) - 1) * np.float32(d))
    return content, np.concatenate(stood).reshape(values.shape)


def ternary_rows(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Trits with another scale for each 64 inputs."""
    rng = np.random.default_rng(seed)
    trits = rng.integers(-1, 2, shape).astype(np.float32)
    scales = rng.uniform(0.02, 0.1, (shape[0], shape[1] // 64)).astype(np.float16)
    return trits * np.repeat(scales.astype(np.float32), 64, axis=1)


def file_and_twin(
    file: Path, architecture: str, number: int, group: int, **options: Any
) -> tuple[Path, Decoder]:
    """A file whose matrices are all of the type, and the dense model with the same values."""
    model = tiny_transformer(architecture, linears=None, **SIZES | options)
    tensors: dict[str, Stored] = tensors_of(model, architecture, "F32", "F32")
    replaced = {}
    for seed, (path, module) in enumerate(model.named_modules()):
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        values = ternary_rows(tuple(module.weight.shape), seed)
        content, stood = q2_0(values, group)
        replaced[f"{path}.weight"] = mx.array(stood)
        heads = {"query_proj": 4, "key_proj": 2}.get(path.rpartition(".")[2])
        if architecture == "llama" and heads:
            content, _ = q2_0(with_pairs_together(values, heads), group)
        name = gguf_name(path)
        tensors[name] = (number, values.shape, content)
    model.update(tree_unflatten(list(replaced.items())))
    return write_gguf(file, metadata_of(model, architecture), tensors), model


def gguf_name(path: str) -> str:
    names = {
        "embed": "token_embd",
        "head": "output",
        "query_proj": "attn_q",
        "key_proj": "attn_k",
        "value_proj": "attn_v",
        "output_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    last = names[path.rpartition(".")[2]]
    return f"blk.{path.split('.')[1]}.{last}.weight" if "." in path else f"{last}.weight"


LAYOUTS = [(Q2_0, 64), (LEGACY, 128), (PRISM, 128)]


@pytest.mark.parametrize(
    ("architecture", "number", "group"),
    [("llama", *LAYOUTS[0]), ("qwen3", *LAYOUTS[1]), ("llama", *LAYOUTS[2])],
)
def test_is_read_without_loss(tmp_path: Path, architecture: str, number: int, group: int) -> None:
    file, twin = file_and_twin(tmp_path / "m.gguf", architecture, number, group)
    model = load_model(file, dtype=mx.float32)
    assert isinstance(model.embed, nn.QuantizedEmbedding)
    assert isinstance(model.head, nn.QuantizedLinear)
    down = model.blocks[0].channel_mixer.down_proj
    assert (down.bits, down.group_size) == (2, group)
    assert mx.array_equal(down(mx.eye(384)).T, twin.blocks[0].channel_mixer.down_proj.weight)
    assert relative_error(model(TOKENS)[0], twin(TOKENS)[0]) <= TOLERANCE[mx.float32]


def test_scales_that_are_no_numbers_are_passed_on_in_silence() -> None:
    # warnings are errors in tests; loading refuses the scales
    data = np.frombuffer(b"\x01\x7c" + bytes(16), np.uint8)
    bits = affine_scales(TYPES[42], data, (1, 64), sign=-1)
    assert np.isnan(bits.view("<f2")).all()


@pytest.mark.parametrize(("number", "group"), [(42, 64), (142, 128)])
def test_values_with_code_3(number: int, group: int) -> None:
    values = np.random.default_rng(1).integers(-1, 3, (3, 256)).astype(np.float32) * 0.25
    values[:, ::group] = 0.25
    blocks = [
        np.float16(0.25).tobytes()
        + bytes(
            sum(int(b[j + k] / 0.25 + 1) << 2 * k for k in range(4)) for j in range(0, group, 4)
        )
        for b in values.reshape(-1, group)
    ]
    data = np.frombuffer(b"".join(blocks), np.uint8)
    np.testing.assert_array_equal(dequantized(TYPES[number], data, values.shape), values)


def test_bitnet_with_one_scale(tmp_path: Path) -> None:
    model = tiny_transformer("bitnet", **SIZES)
    tensors = tensors_of(model, "bitnet-b1.58", "F32")
    for name, (_, shape, content) in tensors.items():
        if len(shape) == 2 and name.startswith("blk"):
            values = np.frombuffer(content, np.float32).reshape(shape)
            tensors[name] = (Q2_0, shape, q2_0(values, 64)[0])
    file = write_gguf(tmp_path / "m.gguf", metadata_of(model, "bitnet-b1.58"), tensors)
    loaded = load_model(file)
    trits, scale = ternarize(model.blocks[0].channel_mixer.up_proj.weight)
    got = loaded.blocks[0].channel_mixer.up_proj
    assert got.scale.item() == np.float32(np.float16(scale.item()))
    got._quantize_activations = False
    assert mx.array_equal(got(mx.eye(256)).T, trits * got.scale)


def mlx_source(folder: Path, group: int, scale: Callable[[mx.array], mx.array]) -> Path:
    """Qwen3 in MLX's affine 2-bit form, as Ternary Bonsai is published."""
    model = tiny_transformer("qwen3", linears=None, **SIZES)
    mx.random.seed(5)
    replaced = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            rows, columns = module.weight.shape
            is_linear = isinstance(module, nn.Linear)
            made = (
                nn.QuantizedLinear(columns, rows, False, group, 2)
                if is_linear
                else nn.QuantizedEmbedding(rows, columns, group, 2)
            )
            codes = mx.random.randint(0, 3, (rows, columns // 16, 16)).astype(mx.uint32)
            shifts = mx.arange(0, 32, 2, dtype=mx.uint32)
            made.weight = (codes << shifts).sum(axis=-1).astype(mx.uint32)
            made.scales = scale(mx.random.uniform(0.02, 0.1, (rows, columns // group)))
            made.biases = -made.scales
            replaced.append((path, made))
    model.update_modules(tree_unflatten(replaced))
    model.set_dtype(mx.float16)
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


@pytest.mark.parametrize("group", [64, 128])
def test_bonsai_becomes_gguf_and_comes_back(tmp_path: Path, group: int) -> None:
    folder = mlx_source(tmp_path / "s", group, lambda scales: scales)
    report = convert(open_checkpoint(folder), tmp_path / "m", to="gguf", gguf_type="q2_0")
    assert report.is_lossless and report.logits_difference is not None
    assert report.logits_difference <= TOLERANCE[mx.float32]
    assert report.groups["ternary matrices"].bits_per_weight == 2.25
    want, got = (load_model(place) for place in (folder, tmp_path / "m"))
    layers = [(model.embed, model.blocks[0].token_mixer.query_proj) for model in (want, got)]
    for ours, theirs in zip(*layers, strict=True):
        assert mx.array_equal(
            *(
                mx.dequantize(m.weight, m.scales, m.biases, group_size=m.group_size, bits=2)
                for m in (ours, theirs)
            )
        )


@pytest.mark.parametrize(("group", "kind"), [(128, "tq2_0"), (32, "q2_0")])
def test_groups_that_do_not_fit(tmp_path: Path, group: int, kind: Any) -> None:
    folder = mlx_source(tmp_path / "s", group, lambda scales: scales)
    with pytest.raises(UnsupportedModelError, match=r"Q2_0 holds ternary codes with a scale for"):
        convert(open_checkpoint(folder), tmp_path / "m", to="gguf", gguf_type=kind)


def test_ternary_llama_comes_back_with_float_activations(tmp_path: Path) -> None:
    save_model(tmp_path / "s", tiny_transformer(**SIZES), GOLDENS / "tokenizer_bpe")
    convert(
        open_checkpoint(tmp_path / "s"), tmp_path / "m", to="gguf", gguf_type="q2_0", check=False
    )
    want, got = (load_model(tmp_path / place).blocks[0].channel_mixer.down_proj for place in "sm")
    assert mx.array_equal(want.weight, got.weight)
    assert got.scale.item() == np.float32(np.float16(want.scale.item()))


def test_sizes_that_no_other_type_takes(tmp_path: Path) -> None:
    # 1bitLLM's 3B has such inputs
    sizes = SIZES | {"hidden_size": 320, "intermediate_size": 576}
    model = tiny_transformer(has_sub_norms=True, tie_word_embeddings=True, **sizes)
    save_model(tmp_path / "s", model, GOLDENS / "tokenizer_bpe")
    convert(
        open_checkpoint(tmp_path / "s"), tmp_path / "m", to="gguf", gguf_type="q2_0", check=False
    )
    want, got = (load_model(tmp_path / place) for place in "sm")
    pairs = (model.blocks[0].channel_mixer.down_proj for model in (want, got))
    assert mx.array_equal(*(layer.weight for layer in pairs))


def test_encoding() -> None:
    values = ternary_rows((3, 256), 2)
    values[0, :64] = 0
    want, stood = q2_0(values, 64)
    codes = (np.sign(stood) + 1).astype(np.uint8)
    scales = np.abs(stood).reshape(3, 4, 64).max(axis=-1)
    assert gguf_blocks.encode("Q2_0", codes, scales).tobytes() == want


def test_room_that_fits_no_layout(tmp_path: Path) -> None:
    model = tiny_transformer(linears=None, **SIZES)
    tensors = tensors_of(model, "llama", "F32", "F32")
    for room in (18 * 4 * 256 + 64, 34 * 2 * 256 - 64):
        tensors["blk.0.attn_q.weight"] = (42, (256, 256), bytes(room))
        file = write_gguf(tmp_path / "m.gguf", metadata_of(model, "llama"), tensors)
        with pytest.raises(CheckpointError, match="groups neither of 64 nor of 128"):
            load_model(file)


def test_rotated_weights(tmp_path: Path) -> None:
    model = tiny_transformer(linears=None, **SIZES)
    metadata = metadata_of(model, "llama") | {"prism.hadamard.block_size": 1024}
    file = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, "llama", "F16"))
    with pytest.raises(UnsupportedModelError, match=r"'prism.hadamard.block_size' must be absent"):
        load_model(file)
