"""BitCPM: floats in which each group of inputs has one size, kept packed with these scales."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.hub import convert, load, load_model, needed_bytes, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint import pack_cache
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import GOLDENS, TOKENS, logits, tiny_transformer
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

MODELS: dict[str, dict[str, Any]] = {
    "minicpm": {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 64.0},
    "llama": {},
}
GROUP = 128


def fake_quantised(model_type: str, **options: Any) -> Decoder:
    """Linears of bfloat16 `{-a, 0, a}` by group, one of which is all zero."""
    sizes = {"vocab_size": 520, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = tiny_transformer(model_type, **sizes | MODELS[model_type] | options, linears=None)
    for path, module in model.named_modules():
        if path.endswith("_proj"):
            groups = mx.unflatten(module.weight, 1, (-1, GROUP))
            scales = mx.mean(mx.abs(groups), axis=2, keepdims=True).astype(mx.bfloat16)
            trits = mx.clip(mx.round(groups / scales), -1, 1)
            trits[3, 1] = 0
            module.weight = mx.flatten(trits * scales, 1)
    model.set_dtype(mx.bfloat16)
    return model


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bitcpm") / request.param
    save_model(folder, fake_quantised(request.param), GOLDENS / "tokenizer_bpe")
    return folder


def groups_of(model: Decoder) -> set[tuple[int, int]]:
    """Bits and group sizes of all projections."""
    layers = [module for path, module in model.named_modules() if path.endswith("_proj")]
    assert len(layers) == 14 and all(isinstance(layer, nn.QuantizedLinear) for layer in layers)
    return {(layer.bits, layer.group_size) for layer in layers}


def test_is_packed_with_the_scales_of_groups(source: Path, tmp_path: Path) -> None:
    model, dense = load_model(source), load_model(source, packed=False)
    assert groups_of(model) == {(2, GROUP)}
    weights = dict(dense.named_modules())
    for path, layer in model.named_modules():
        if isinstance(layer, nn.QuantizedLinear):
            codes = layer.weight, layer.scales, layer.biases
            matrix = mx.dequantize(*codes, layer.group_size, layer.bits)
            assert mx.array_equal(matrix + 0, weights[path].weight + 0), path
    exact = (
        logits(load_model(source, packed=is_packed, dtype=mx.float32))
        for is_packed in (True, False)
    )
    assert relative_error(*exact) <= TOLERANCE[mx.float32]
    planned = needed_bytes(open_checkpoint(source))
    assert 1.0 <= planned / sum(x.nbytes for x in parameters(model).values()) <= 1.1
    save_model(tmp_path / "again", model)
    assert mx.array_equal(logits(load_model(tmp_path / "again")), logits(model))


def test_stock_mlx_lm_opens_what_is_written(source: Path, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    report = convert(open_checkpoint(source), tmp_path / "m")
    assert report.is_lossless and report.openings[0].opens
    assert groups_of(load_model(tmp_path / "m")) == {(2, GROUP)}
    theirs, _ = load_with_mlx_lm(tmp_path / "m")
    theirs.set_dtype(mx.float32)
    want = logits(load_model(source, dtype=mx.float32))
    assert relative_error(theirs(TOKENS), want) <= TOLERANCE[mx.float32]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["q2_0", "tq2_0"])
def test_gguf(source: Path, tmp_path: Path, kind: Any) -> None:
    """Blocks of 64 inputs hold the scales of 128; blocks of 256 do not, and floats stay floats."""
    report = convert(open_checkpoint(source), tmp_path / "m", to="gguf", gguf_type=kind)
    assert report.total.difference < 1e-3
    model, _ = load(tmp_path / "m", dtype=mx.float32)
    assert groups_of(model) == ({(2, 64)} if kind == "q2_0" else {(2, GROUP)})
    # scales of bfloat16 become float16
    error = relative_error(logits(model), logits(load_model(source, dtype=mx.float32)))
    assert error <= TOLERANCE[mx.float16]


def test_the_packed_format_is_cached(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path))
    monkeypatch.setattr(pack_cache, "MIN_SOURCE_BYTES", 0)
    want = logits(load_model(source))
    assert "is kept in" in capsys.readouterr().err
    again = load_model(source)
    assert groups_of(again) == {(2, GROUP)}
    assert capsys.readouterr().err == ""
    assert mx.array_equal(logits(again), want)
