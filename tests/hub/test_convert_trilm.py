"""Dense checkpoints whose values are ternary already, as TriLM's, keep every value in each form."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.layers import PackedLinear
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import GOLDENS, tiny_transformer
from tests.tolerances import TOLERANCE, relative_error

TOKENS = mx.array([[1, 7, 3, 39, 0]])
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
    """What each linear of the block computes, from products with the unit vectors."""
    found = {}
    for mixer in (model.blocks[0].token_mixer, model.blocks[0].channel_mixer):
        for name, module in mixer.named_modules():
            if name.endswith("_proj"):
                found[name] = module(mx.eye(512)).T
    return found


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("to", ["mlx", "hf", "gguf"])
def test_values_are_kept(tmp_path: Path, to: Any, parts: int, is_packed: bool) -> None:
    save_model(tmp_path / "s", trilm(parts), GOLDENS / "tokenizer_bpe")
    source = tmp_path / "s"
    if is_packed:
        source = tmp_path / "p"
        save_model(source, load_model(tmp_path / "s"), tmp_path / "s")
    report = convert(open_checkpoint(source), tmp_path / "m", to=to)
    assert report.total.difference == 0 and report.logits_difference == 0
    if to != "hf":
        assert report.groups["ternary matrices"].bits_per_weight < 2.3
    model = load_model(tmp_path / "m")
    assert isinstance(model.blocks[0].channel_mixer.down_proj, PackedLinear)
    want, got = weights(load_model(tmp_path / "s")), weights(model)
    assert all(mx.array_equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0", "q2_0"])
@pytest.mark.parametrize("parts", [1, 2])
def test_mlx_form_becomes_gguf(tmp_path: Path, parts: int, kind: Any) -> None:
    save_model(tmp_path / "s", trilm(parts), GOLDENS / "tokenizer_bpe")
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "mlx")
    report = convert(open_checkpoint(tmp_path / "mlx"), tmp_path / "m", to="gguf", gguf_type=kind)
    assert report.total.difference == 0 and report.logits_difference == 0
    assert report.groups["ternary matrices"].bits_per_weight < 2.3
    want, got = weights(load_model(tmp_path / "s")), weights(load_model(tmp_path / "m"))
    assert all(mx.array_equal(want[name], got[name]) for name in want)


def test_mlx_lm_runs_it(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    save_model(tmp_path / "s", trilm(2))
    convert(open_checkpoint(tmp_path / "s"), tmp_path / "m")
    theirs, _ = load_with_mlx_lm(tmp_path / "m")
    theirs.set_dtype(mx.float32)
    ours = load_model(tmp_path / "m", dtype=mx.float32)
    assert relative_error(theirs(TOKENS), ours(TOKENS)[0]) <= TOLERANCE[mx.float32]
