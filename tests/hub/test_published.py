"""Every published family, from tiny checkpoints in its exact format: what the loaded linears hold."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.checkpoint import pack_cache
from mlx_mmfree.hub.remote.source import Source
from mlx_mmfree.layers import PackedBitLinear, PackedLinear
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.architecture import WeightNames
from mlx_mmfree.ops import ternarize
from mlx_mmfree.ops.ternary import unpack_ternary
from tests.hub.checkpoints import TOKENS
from tests.hub.published import FAMILIES, Written, write_published
from tests.tolerances import TOLERANCE, relative_error

# configurations that do not tell whether floats are masters: the caller or the revision does
ASKED = {"Falcon-E prequantized": True, "Falcon-E bfloat16": False}
TRILM = [name for name in FAMILIES if name.startswith("TriLM")]


def linears(model: Decoder) -> dict[str, PackedBitLinear | PackedLinear]:
    """The packed linears by their names on the Hub."""
    names = WeightNames(find(model.config.model_type).weight_names)
    return {
        names.to_disk(f"{path}.weight").removesuffix(".weight"): module
        for path, module in model.named_modules()
        if isinstance(module, PackedBitLinear | PackedLinear)
    }


def weight_of(module: PackedBitLinear | PackedLinear) -> mx.array:
    """The matrix that a packed linear stands for."""
    trits = unpack_ternary(module.weight, module.input_dims)
    columns = module.input_scale if "input_scale" in module else 1.0
    return trits * module.scale[:, None] * columns


def check(model: Decoder, written: Written, kind: type) -> None:
    found = linears(model)
    assert all(type(module) is kind for module in found.values())
    assert set(found) == set(written.trits) | set(written.masters)
    for name, module in found.items():
        if name in written.masters:
            trits, scale = ternarize(written.masters[name])
            assert mx.array_equal(weight_of(module), trits * scale), name
            continue
        trits, scales = written.trits[name], written.scales[name].astype(np.float32)
        got = unpack_ternary(module.weight, module.input_dims)
        assert np.array_equal(np.array(got), trits), name
        assert relative_error(weight_of(module), mx.array(trits * scales)) <= 1e-7, name


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_loads(tmp_path: Path, name: str) -> None:
    written = write_published(tmp_path / "m", name)
    family = FAMILIES[name]
    model = load_model(tmp_path / "m", latent=ASKED.get(name))
    check(model, written, PackedLinear if family.stored == "dense" else PackedBitLinear)
    assert model.dtype == family.dtype
    config = model.config
    assert config.rotation.theta == family.config["rope_theta"]
    assert config.rms_norm_eps == family.config["rms_norm_eps"]
    assert config.has_sub_norms == (family.sub_norms is not None)
    assert "head" not in model or type(model.head).__name__ == "Linear"
    logits = model(TOKENS)[0]
    assert mx.all(mx.isfinite(logits)).item()
    save_model(tmp_path / "again", model)
    again = load_model(tmp_path / "again")
    assert again.config == config
    assert mx.array_equal(again(TOKENS)[0], logits)


@pytest.mark.parametrize("name", TRILM)
def test_dense_values_lose_nothing(tmp_path: Path, name: str) -> None:
    write_published(tmp_path / "m", name)
    packed = load_model(tmp_path / "m", dtype=mx.float32)
    dense = load_model(tmp_path / "m", dtype=mx.float32, packed=False)
    assert not linears(dense)
    error = relative_error(packed(TOKENS)[0], dense(TOKENS)[0])
    assert error <= TOLERANCE[mx.float32]
    assert linears(packed)["model.layers.0.mlp.down_proj"].scale.shape == (1,)
    rows = linears(packed)["model.layers.0.mlp.up_proj"].scale.size
    assert rows == (1 if name == "TriLM of 1" else 384)


def test_one_value_more_stays_dense(tmp_path: Path) -> None:
    write_published(tmp_path / "m", "TriLM of 2")
    file = str(tmp_path / "m" / "model.safetensors")
    tensors = dict(mx.load(file))
    mx.eval(tensors)
    name = "model.layers.1.mlp.gate_proj"
    weight = np.array(tensors[f"{name}.weight"])
    weight[-1, -1] = 0.3
    mx.save_safetensors(file, tensors | {f"{name}.weight": mx.array(weight)})
    model = load_model(tmp_path / "m")
    assert len(linears(model)) == 13
    assert name not in linears(model)


@pytest.mark.parametrize("name", ASKED)
def test_floats_of_falcon_e(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_published(tmp_path / "m", name)
    with pytest.raises(CheckpointError, match="'latent' must be given"):
        load_model(tmp_path / "m")
    monkeypatch.setattr(Source, "fetch", lambda *_: tmp_path / "m")
    model = load_model("tiiuae/Falcon-E-1B-Base", revision=name.split()[1])
    check(model, written, PackedBitLinear if ASKED[name] else PackedLinear)


@pytest.mark.parametrize("name", [*TRILM, "bitnet_b1_58-3B"])
def test_keeps_what_was_packed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pack_cache, "MIN_SOURCE_BYTES", 0)
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path / "cache"))
    write_published(tmp_path / "m", name)
    first = load_model(tmp_path / "m")
    assert "is kept in" in capsys.readouterr().err
    second = load_model(tmp_path / "m")
    assert capsys.readouterr().err == ""
    assert second.config == first.config
    assert mx.array_equal(second(TOKENS)[0], first(TOKENS)[0])
