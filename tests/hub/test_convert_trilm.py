"""Dense checkpoints whose values are ternary already, as TriLM's, keep every value in each format."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.layers import PackedLinear
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import GOLDENS, TOKENS, tiny_transformer
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

SIZES: dict[str, Any] = {
    "vocab_size": 520,
    "hidden_size": 512,
    "intermediate_size": 512,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "linears": None,
}


def split_scales(parts: int, axis: int) -> mx.array:
    """One scale for each part of 512 rows (axis 0) or columns, to be multiplied by a matrix."""
    values = mx.repeat(mx.linspace(0.02, 0.05, parts), 512 // parts)
    return values[:, None] if axis == 0 else values


def trilm(parts: int) -> Decoder:
    """A dense Llama with ternary values: scales by rows, in `o_proj` and `down_proj` by columns."""
    model = tiny_transformer("llama", **SIZES)
    mx.random.seed(7)
    mixers = (model.blocks[0].token_mixer, model.blocks[0].channel_mixer)
    for mixer in mixers:
        for name, module in mixer.named_modules():
            if name.endswith("_proj"):
                rows, columns = module.weight.shape
                trits = mx.random.randint(-1, 2, (rows, columns)).astype(mx.float32)
                # zeros of both signs, as float kernels leave them
                trits = mx.where((trits == 0) & (mx.arange(columns) % 2 == 0), -trits, trits)
                is_by_column = name in ("output_proj", "down_proj")
                scales = split_scales(parts, int(is_by_column))
                module.weight = trits * (scales if is_by_column else scales[:rows])
    model.set_dtype(mx.float16)
    return model


def weights(model: Decoder) -> dict[str, mx.array]:
    """The matrix of each linear of the block, from products with the unit vectors."""
    found = {}
    for mixer in (model.blocks[0].token_mixer, model.blocks[0].channel_mixer):
        for name, module in mixer.named_modules():
            if name.endswith("_proj"):
                found[name] = module(mx.eye(512)).T
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Folders by format and number of scales: as published, packed, and in MLX's format."""
    folders = {}
    for parts in (1, 2):
        root = tmp_path_factory.mktemp("trilm")
        folders |= {(format, parts): root / format for format in ("floats", "packed", "mlx")}
        save_model(root / "floats", trilm(parts), GOLDENS / "tokenizer_bpe")
        save_model(root / "packed", load_model(root / "floats"), root / "floats")
        convert(open_checkpoint(root / "floats"), root / "mlx", check=False)
    return folders


@pytest.fixture(scope="module")
def products(sources: dict[tuple[str, int], Path]) -> dict[int, dict[str, mx.array]]:
    """The matrices of the linears, by number of scales."""
    return {parts: weights(load_model(sources["floats", parts])) for parts in (1, 2)}


# every pair of values occurs
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("format", "to", "parts"),
    [
        ("floats", "mlx", 1),
        ("packed", "mlx", 2),
        ("packed", "hf", 1),
        ("floats", "hf", 2),
        ("floats", "gguf", 1),
        ("packed", "gguf", 2),
    ],
)
def test_values_are_kept(
    tmp_path: Path,
    sources: dict[tuple[str, int], Path],
    products: dict[int, dict[str, mx.array]],
    format: str,
    to: Any,
    parts: int,
) -> None:
    report = convert(open_checkpoint(sources[format, parts]), tmp_path / "m", to=to)
    assert report.total.difference == 0 and report.logits_difference == 0
    if to != "hf":
        assert report.groups["ternary matrices"].bits_per_weight < 2.3
    model = load_model(tmp_path / "m")
    assert isinstance(model.blocks[0].channel_mixer.down_proj, PackedLinear)
    want, got = products[parts], weights(model)
    assert all(mx.array_equal(want[name], got[name]) for name in want)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "parts"), [("tq1_0", 2), ("tq2_0", 1), ("q2_0", 1), ("q2_0", 2)])
def test_mlx_format_becomes_gguf(
    tmp_path: Path,
    sources: dict[tuple[str, int], Path],
    products: dict[int, dict[str, mx.array]],
    kind: Any,
    parts: int,
) -> None:
    source = open_checkpoint(sources["mlx", parts])
    report = convert(source, tmp_path / "m", to="gguf", gguf_type=kind)
    assert report.total.difference == 0 and report.logits_difference == 0
    assert report.groups["ternary matrices"].bits_per_weight < 2.3
    want, got = products[parts], weights(load_model(tmp_path / "m"))
    assert all(mx.array_equal(want[name], got[name]) for name in want)


def test_mlx_lm_runs_it(sources: dict[tuple[str, int], Path]) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    theirs, _ = load_with_mlx_lm(sources["mlx", 2])
    theirs.set_dtype(mx.float32)
    ours = load_model(sources["mlx", 2], dtype=mx.float32)
    assert relative_error(theirs(TOKENS), ours(TOKENS)[0]) <= TOLERANCE[mx.float32]
