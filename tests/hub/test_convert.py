"""Conversion as a whole: verified, whole or not at all, and within bounded memory."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.files import tensors as safetensors_writer
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.conversion import verify as verification
from mlx_mmfree.hub.conversion.to_folder import FloatFormats, ternarize_groups, ternarized
from mlx_mmfree.ops import ternarize
from tests.hub.checkpoints import tiny_checkpoint, tiny_model, tiny_transformer

ROOT = Path(__file__).parents[2]
SHARD_BYTES = 12_000_000
CONVERT = """
import resource, sys
from mlx_mmfree.files import tensors as safetensors_writer
from mlx_mmfree.hub import convert, open_checkpoint
safetensors_writer.MAX_SHARD_BYTES = int(sys.argv[4])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
convert(open_checkpoint(sys.argv[1]), sys.argv[2] + "-warm", check=False)
before = peak()
convert(open_checkpoint(sys.argv[3]), sys.argv[2], check=False)
print(peak() - before)
"""
KILLED = (
    """
import os, signal, sys
from pathlib import Path
from mlx_mmfree.files import tensors as safetensors_writer

def killed(array, write=safetensors_writer.tensor_bytes):
    if list(Path(sys.argv[2]).parent.glob(".m.*.mmfree/new/*.safetensors")):
        os.kill(os.getpid(), signal.SIGKILL)
    return write(array)

safetensors_writer.tensor_bytes = killed
"""
    + CONVERT
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of float masters in several shards."""
    folder = tmp_path_factory.mktemp("large") / "m"
    sizes = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 10}
    model = tiny_transformer("llama", **sizes, **heads)
    model.set_dtype(mx.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_writer, "MAX_SHARD_BYTES", SHARD_BYTES)
        save_model(folder, model)
    assert len(list(folder.glob("model-*.safetensors"))) >= 5
    return folder


def command(program: str, large: Path, tmp_path: Path) -> list[str]:
    tiny = tmp_path / "tiny"
    save_model(tiny, tiny_transformer("llama"))
    return [sys.executable, "-c", program, *map(str, (tiny, tmp_path / "m", large, SHARD_BYTES))]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.exhaustive
def test_memory_is_bounded_by_the_largest_shard(large: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        command(CONVERT, large, tmp_path),
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    shard = max(file.stat().st_size for file in large.glob("model-*.safetensors"))
    entries = open_checkpoint(large).tensors.values()
    assert sum(entry.nbytes for entry in entries) > 5 * shard
    assert int(run.stdout) < 2 * shard + max(entry.nbytes for entry in entries)


@pytest.mark.exhaustive
def test_killed_conversion_leaves_no_target(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "m"
    run = subprocess.run(command(KILLED, large, tmp_path), env=environment(), capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert list(tmp_path.glob(".m.*.mmfree/new/*.safetensors")) and not target.exists()
    assert len(list(tmp_path.glob(".m.*"))) == 1
    convert(open_checkpoint(tmp_path / "tiny"), target)
    load_model(target)
    assert not list(tmp_path.glob(".m.*"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "to"), [("hgrn_bit", "mlx"), ("llama", "mlx"), ("llama", "hf")], ids=str
)
@pytest.mark.parametrize("size", [1, 3, 2], ids=["scales", "norms", "matrices"])
def test_a_changed_bit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, to: Any, size: int
) -> None:
    model = tiny_model() if kind == "hgrn_bit" else tiny_transformer(kind)
    save_model(tmp_path / "s", model)
    real, is_changed = safetensors_writer.tensor_bytes, []

    def change(array: mx.array) -> np.ndarray:
        data = real(array).copy()
        is_scale, is_norm = array.shape == (1,), array.ndim == 1 and array.size > 1
        found = {1: is_scale, 3: is_norm, 2: array.ndim == 2 and array.dtype != mx.float32}[size]
        if found and not is_changed:
            # code 1 becomes 0, and 0 or 2 another one
            data[0] ^= 1
            is_changed.append(True)
        return data

    monkeypatch.setattr(safetensors_writer, "tensor_bytes", change)
    with pytest.raises(CheckpointError, match=r"\[verify\] tensor|ternary codes"):
        convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", to=to)
    assert is_changed
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


def test_other_logits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path / "s")
    monkeypatch.setattr(verification, "compare_logits", lambda *_: float("nan"))
    with pytest.raises(CheckpointError, match="the logits must be equal"):
        convert(open_checkpoint(tmp_path / "s"), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_counts(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "s")
    report = convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", check=False)
    assert report.logits_difference is None and report.total.difference is None
    files = (*(tmp_path / "m").glob("*.safetensors"),)
    tensors = [array for file in files for array in mx.load(str(file)).values()]
    assert report.total.target_bytes == sum(array.nbytes for array in tensors)
    floats = mx.load(str(tmp_path / "s" / "model.safetensors")).values()
    assert report.total.source_bytes == sum(array.nbytes for array in floats)
    assert report.total.weights == sum(array.size for array in floats)
    ternary = report.groups["ternary matrices"]
    assert ternary.bits_per_weight == 8 * ternary.target_bytes / ternary.weights


def test_existing_targets(tmp_path: Path) -> None:
    source = open_checkpoint(tiny_checkpoint(tmp_path / "s"))
    convert(source, tmp_path / "m")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        convert(source, tmp_path / "m")
    convert(
        source, tmp_path / "m", to="hf", formats=FloatFormats(keep_masters=True), overwrite=True
    )
    assert not (tmp_path / "m" / "mmfree_model.py").exists()


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(tiny_checkpoint(tmp_path / "s"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(
        CheckpointError, match=r"needed and 16\.0 MB stay free, but only 1\.0 MB are free"
    ):
        convert(source, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_dense_to_ternary_with_one_scale(tmp_path: Path, model_type: str) -> None:
    dense = tiny_transformer(model_type, linears=None)
    save_model(tmp_path / "s", dense)
    convert(ternarized(open_checkpoint(tmp_path / "s")), tmp_path / "m")
    model = load_model(tmp_path / "m")
    for ours, theirs in zip(model.blocks, dense.blocks, strict=True):
        layer = ours.channel_mixer.up_proj
        trits, scale = ternarize(theirs.channel_mixer.up_proj.weight)
        assert mx.array_equal(layer.scale, scale)
        layer._quantize_activations = False
        assert mx.array_equal(layer(mx.eye(24)).T, trits * scale)
    assert mx.array_equal(model.head.weight, dense.head.weight)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_groups_are_ternarised_by_their_own_mean(dtype: mx.Dtype) -> None:
    mx.random.seed(0)
    weight = (mx.random.normal((5, 256)) * mx.linspace(0, 3, 256)).astype(dtype)
    packed, scales, biases = ternarize_groups(weight)
    got = np.array(mx.dequantize(packed, scales, biases, group_size=128, bits=2).astype(mx.float32))
    values = np.array(weight.astype(mx.float32)).reshape(5, 2, 128)
    scale = np.array(scales.astype(mx.float32))
    np.testing.assert_allclose(
        scale, np.abs(values).mean(-1), rtol=1e-6 if dtype == mx.float32 else 4e-3
    )
    want = np.clip(np.round(values / scale[..., None]), -1, 1) * scale[..., None]
    np.testing.assert_array_equal(got, want.reshape(5, 256))
    assert mx.array_equal(biases, -scales)


@pytest.mark.parametrize("options", [{}, {"has_sub_norms": True, "linears": None}], ids=str)
def test_only_dense_models_are_ternarised(tmp_path: Path, options: dict[str, Any]) -> None:
    save_model(tmp_path / "t", tiny_transformer("llama", **options))
    with pytest.raises(UnsupportedModelError, match="'ternarize' must be left out"):
        ternarized(open_checkpoint(tmp_path / "t"))


def test_matmul_free_models_are_not_ternarised(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "h")
    with pytest.raises(UnsupportedModelError, match="It is for gemma3_text, hybrid, llama, min"):
        ternarized(open_checkpoint(tmp_path / "h"))
