"""Types of GGUF with codes of 1 or 2 bits and a scale for each 64 or 128 inputs."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.files import gguf_blocks
from mlx_mmfree.files.gguf_blocks import Q2_0, TYPES, code_scales, dequantized
from mlx_mmfree.files.gguf_file import read_gguf
from mlx_mmfree.hub import convert, load_model, needed_bytes, open_checkpoint, save_model
from mlx_mmfree.layers.matrix import parameters
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


def ternary_rows(shape: tuple[int, int], seed: int, step: int = 1) -> np.ndarray:
    """Trits, or with a step of 2 signs, with another scale for each 64 inputs."""
    rng = np.random.default_rng(seed)
    trits = rng.choice(np.arange(-1, 2, step), shape).astype(np.float32)
    scales = rng.uniform(0.02, 0.1, (shape[0], shape[1] // 64)).astype(np.float16)
    return trits * np.repeat(scales.astype(np.float32), 64, axis=1)


def q1_0(values: np.ndarray, group: int) -> tuple[bytes, np.ndarray]:
    """From the definition: a float16 scale d, then the sign of value j at bit `j % 8` of byte `j / 8`,
    set for d and not for -d.
    """
    content, stood = b"", []
    for block in values.reshape(-1, group):
        d = np.float16(np.abs(block).max())
        bits = [int(value > 0) for value in block]
        packed = [sum(bits[j + k] << k for k in range(8)) for j in range(0, group, 8)]
        content += d.tobytes() + bytes(packed)
        stood.append((2 * np.array(bits, np.float32) - 1) * np.float32(d))
    return content, np.concatenate(stood).reshape(values.shape)


def trits_in_bytes(values: np.ndarray, group: int) -> tuple[bytes, np.ndarray]:
    """PTQ1_0 from the definition: trits of the bytes 0 to 15, 16 to 23 and 24 to 25, then the scale.

    The first trit of every byte comes before the second of any. A byte holds its trits as a fraction of
    243, the first as its highest digit.
    """
    content, stood = b"", []
    for block in values.reshape(-1, group):
        d = np.float16(np.abs(block).max())
        trits = np.rint(block / np.float32(d)).astype(int) if d else np.zeros(group, int)
        data, start = [], 0
        for count, digits in ((16, 5), (8, 5), (2, 4)):
            part = trits[start : start + count * digits].reshape(digits, count) + 1
            numbers = sum(part[n] * 3 ** (4 - n) for n in range(digits))
            data += [-(-256 * int(number) // 243) for number in numbers]
            start += count * digits
        content += bytes(data) + d.tobytes()
        stood.append(trits * np.float32(d))
    return content, np.concatenate(stood).astype(np.float32).reshape(values.shape)


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
        encode = {41: q1_0, 143: trits_in_bytes}.get(number, q2_0)
        values = ternary_rows(tuple(module.weight.shape), seed, 2 if number == 41 else 1)
        content, stood = encode(values, group)
        replaced[f"{path}.weight"] = mx.array(stood)
        heads = {"query_proj": 4, "key_proj": 2}.get(path.rpartition(".")[2])
        if architecture == "llama" and heads:
            content, _ = encode(with_pairs_together(values, heads), group)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("architecture", "number", "group"),
    [
        ("llama", Q2_0, 64),
        ("qwen3", LEGACY, 128),
        ("llama", PRISM, 128),
        ("llama", 41, 128),
        ("qwen3", 143, 128),
    ],
)
def test_is_read_without_loss(tmp_path: Path, architecture: str, number: int, group: int) -> None:
    file, twin = file_and_twin(tmp_path / "m.gguf", architecture, number, group)
    model = load_model(file, dtype=mx.float32)
    assert isinstance(model.embed, nn.QuantizedEmbedding)
    assert isinstance(model.head, nn.QuantizedLinear)
    down = model.blocks[0].channel_mixer.down_proj
    assert (down.bits, down.group_size) == (1 if number == 41 else 2, group)
    written = mx.dequantize(down.weight, down.scales, down.biases, group, down.bits)
    assert mx.array_equal(written, twin.blocks[0].channel_mixer.down_proj.weight)
    assert relative_error(model(TOKENS)[0], twin(TOKENS)[0]) <= TOLERANCE[mx.float32]
    # floats stay what they are, and so does what they take
    usual = load_model(file)
    assert mx.array_equal(usual.norm.weight, twin.norm.weight)
    assert usual.norm.weight.dtype == mx.float32
    nbytes = sum(array.nbytes for array in parameters(usual).values())
    assert needed_bytes(open_checkpoint(file)) == nbytes


def test_scales_that_are_no_numbers_are_passed_on_in_silence() -> None:
    # warnings are errors in tests; loading refuses the scales
    data = np.frombuffer(b"\x01\x7c" + bytes(16), np.uint8)
    bits = code_scales(TYPES[42], data, (1, 64), factor=-1)
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


def mlx_source(folder: Path, group: int, bits: int = 2) -> Path:
    """Qwen3 in MLX's affine format, as Bonsai is published: with 2 bits ternary, with 1 bit signs."""
    model = tiny_transformer("qwen3", linears=None, **SIZES)
    mx.random.seed(5)
    replaced = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            rows, columns = module.weight.shape
            is_linear = isinstance(module, nn.Linear)
            made = (
                nn.QuantizedLinear(columns, rows, False, group, bits)
                if is_linear
                else nn.QuantizedEmbedding(rows, columns, group, bits)
            )
            words = (rows, columns * bits // 32, 32 // bits)
            codes = mx.random.randint(0, bits + 1, words).astype(mx.uint32)
            shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
            made.weight = (codes << shifts).sum(axis=-1).astype(mx.uint32)
            made.biases = -mx.random.uniform(0.02, 0.1, (rows, columns // group))
            made.scales = -made.biases * (2 if bits == 1 else 1)
            replaced.append((path, made))
    model.update_modules(tree_unflatten(replaced))
    model.set_dtype(mx.float16)
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("group", "bits", "kind", "size"),
    [
        (64, 2, "q2_0", 2.25),
        (128, 2, "q2_0", 2.25),
        (128, 1, "q1_0", 1.125),
    ],
)
def test_bonsai_becomes_gguf_and_comes_back(
    tmp_path: Path, group: int, bits: int, kind: Any, size: float
) -> None:
    folder = mlx_source(tmp_path / "s", group, bits)
    report = convert(open_checkpoint(folder), tmp_path / "m", to="gguf")
    assert (tmp_path / "m" / f"m-{kind.upper()}.gguf").exists()
    assert report.is_lossless and report.logits_difference is not None
    assert report.logits_difference <= TOLERANCE[mx.float32]
    assert report.groups["ternary matrices"].bits_per_weight == size
    want, got = (load_model(path) for path in (folder, tmp_path / "m"))
    layers = [(model.embed, model.blocks[0].token_mixer.query_proj) for model in (want, got)]
    for ours, theirs in zip(*layers, strict=True):
        assert mx.array_equal(
            *(
                mx.dequantize(m.weight, m.scales, m.biases, group_size=m.group_size, bits=m.bits)
                for m in (ours, theirs)
            )
        )


@pytest.mark.parametrize(("bits", "kind"), [(1, "q1_0"), (2, "q2_0")])
def test_stock_mlx_lm_opens_what_becomes_of_gguf(
    tmp_path: Path, bits: int, kind: Any, unfused: None
) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    source = open_checkpoint(mlx_source(tmp_path / "s", 128, bits))
    convert(source, tmp_path / "g", to="gguf", gguf_type=kind, check=False)
    report = convert(open_checkpoint(tmp_path / "g"), tmp_path / "m")
    assert report.is_lossless and report.openings[0].opens
    theirs, _ = load_with_mlx_lm(tmp_path / "m")
    theirs.set_dtype(mx.float32)
    got = load_model(source, dtype=mx.float32)(TOKENS)[0]
    assert relative_error(got, theirs(TOKENS)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    ("group", "bits", "kind"),
    [(128, 2, "tq2_0"), (32, 2, "q2_0"), (128, 2, "q1_0"), (64, 1, "q1_0"), (128, 1, "q2_0")],
)
def test_groups_that_do_not_fit(tmp_path: Path, group: int, bits: int, kind: Any) -> None:
    folder = mlx_source(tmp_path / "s", group, bits)
    with pytest.raises(
        UnsupportedModelError, match=rf"the {bits}-bit codes of .* Q2_0 holds ternary codes with"
    ):
        convert(open_checkpoint(folder), tmp_path / "m", to="gguf", gguf_type=kind)


def test_ternary_llama_comes_back_with_float_activations(tmp_path: Path) -> None:
    save_model(tmp_path / "s", tiny_transformer(**SIZES), GOLDENS / "tokenizer_bpe")
    convert(
        open_checkpoint(tmp_path / "s"), tmp_path / "m", to="gguf", gguf_type="q2_0", check=False
    )
    want, got = (load_model(tmp_path / name).blocks[0].channel_mixer.down_proj for name in "sm")
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
    want, got = (load_model(tmp_path / name) for name in "sm")
    pairs = (model.blocks[0].channel_mixer.down_proj for model in (want, got))
    assert mx.array_equal(*(layer.weight for layer in pairs))


def test_encoding() -> None:
    values = ternary_rows((3, 256), 2)
    values[0, :64] = 0
    want, stood = q2_0(values, 64)
    codes = (np.sign(stood) + 1).astype(np.uint8)
    scales = np.abs(stood).reshape(3, 4, 64).max(axis=-1)
    assert gguf_blocks.encode(TYPES[Q2_0], codes, scales).tobytes() == want


def test_capacity_that_fits_no_layout(tmp_path: Path) -> None:
    model = tiny_transformer(linears=None, **SIZES)
    tensors = tensors_of(model, "llama", "F32", "F32")
    for capacity in (18 * 4 * 256 + 64, 34 * 2 * 256 - 64):
        tensors["blk.0.attn_q.weight"] = (42, (256, 256), bytes(capacity))
        file = write_gguf(tmp_path / "m.gguf", metadata_of(model, "llama"), tensors)
        with pytest.raises(CheckpointError, match="groups neither of 64 nor of 128"):
            load_model(file)


def test_rotated_weights(tmp_path: Path) -> None:
    model = tiny_transformer(linears=None, **SIZES)
    metadata = metadata_of(model, "llama") | {"prism.hadamard.block_size": 1024}
    file = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, "llama", "F16"))
    with pytest.raises(UnsupportedModelError, match=r"'prism.hadamard.version' .* must be 1 or 2"):
        load_model(file)


def assert_texts_are_those_of_llama_cpp(file: Path, model: Decoder, prompt: list[int]) -> None:
    """Its logits, and its tokens for as long as no two are nearer than its rounding of activations.

    What each layer rounds to 8 bits adds up as independent errors do.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False)
    theirs.eval(prompt)
    got, want = model(mx.array([prompt]))[0][0], mx.array(np.array(theirs.scores[: len(prompt)]))
    assert relative_error(got, want) <= 0.03 * len(model.blocks) ** 0.5
    rounding = 2 * mx.max(mx.abs(got - want)).item()
    theirs.reset()
    tokens = list(prompt)
    for token in theirs.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        logits = model(mx.array([tokens]))[0][0, -1]
        first, second = mx.sort(logits)[-2:].tolist()[::-1]
        if first - second <= rounding or len(tokens) == len(prompt) + 16:
            break
        assert token == mx.argmax(logits).item()
        tokens.append(token)
    assert len(tokens) > len(prompt)


@pytest.mark.interop
@pytest.mark.parametrize(
    ("group", "bits", "kind"), [(128, 1, "q1_0"), (64, 2, "q2_0"), (128, 2, "q2_0")]
)
def test_what_is_written_in_llama_cpp(tmp_path: Path, group: int, bits: int, kind: Any) -> None:
    source = open_checkpoint(mlx_source(tmp_path / "s", group, bits))
    convert(source, tmp_path / "m", to="gguf", gguf_type=kind, check=False)
    file = tmp_path / "m" / f"m-{kind.upper()}.gguf"
    assert_texts_are_those_of_llama_cpp(file, load_model(file), [5, 77, 130, 9, 260])


def golden_for_llama_cpp(name: str, folder: Path) -> tuple[Path, Decoder]:
    """A golden that says how large its vocabulary is, since it has none; and its model here."""
    source = GOLDENS / name / "model.gguf"
    metadata, tensors = read_gguf(source)
    content, numbers = source.read_bytes(), {kind.name: number for number, kind in TYPES.items()}
    reported = {
        "tokenizer.ggml.model": "none",
        f"{metadata['general.architecture']}.vocab_size": tensors["token_embd.weight"].shape[0],
    }
    stored = {
        each.name: (numbers[each.kind.name], each.shape, content[each.start : each.stop])
        for each in tensors.values()
    }
    file = write_gguf(folder / "m.gguf", metadata | reported, stored)
    return file, load_model(source, dtype=mx.float32)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["gguf_qwen3_q1_0", "gguf_qwen3_q2_0", "gguf_qwen35_q2_0"])
def test_goldens_in_llama_cpp(tmp_path: Path, name: str) -> None:
    assert_texts_are_those_of_llama_cpp(*golden_for_llama_cpp(name, tmp_path), [3, 17, 5, 40])


@pytest.mark.interop
def test_maple_in_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two experts are as good as equal, its rounding of activations may choose the other one."""
    llama_cpp = pytest.importorskip("llama_cpp")
    file, model = golden_for_llama_cpp("gguf_maple_q2_0", tmp_path)
    tokens, layer, position = [2, 30, 11, 8, 25, 6, 14, 33, 27, 4, 19, 38, 21, 10, 35, 16], 2, 11
    theirs = llama_cpp.Llama(str(file), n_ctx=16, logits_all=True, verbose=False)
    theirs.eval(tokens)
    got = mx.array(np.array(theirs.scores[: len(tokens)]))
    mine = model(mx.array([tokens]))[0][0]
    mixer = model.blocks[layer].channel_mixer
    choose, near = mixer.choose, []

    def choose_other(x: mx.array) -> tuple[mx.array, mx.array]:
        chosen, weights = choose(x)
        best = mx.argsort(-mixer.router(x[0, position]))[:3].tolist()
        shares = mx.softmax(mixer.router(x[0, position]))[mx.array(best)]
        near.append((shares[1] / shares[2]).item())
        chosen[0, position] = mx.array([best[0], best[2]], chosen.dtype)
        weights[0, position] = shares[mx.array([0, 2])] / (shares[0] + shares[2])
        return chosen, weights

    monkeypatch.setattr(mixer, "choose", choose_other)
    other = model(mx.array([tokens]))[0][0]
    assert 1 < near[0] < 1.01
    # its rounding makes at most 0.07; another expert makes 0.6
    tolerance = 0.1
    rest = mx.array([n for n in range(len(tokens)) if n != position])
    assert relative_error(got[rest], mine[rest]) <= tolerance
    errors = [relative_error(got[position], each[position]) for each in (mine, other)]
    assert min(errors) <= tolerance < max(errors)
