"""Numbers outside a dtype's range are refused by name, rates stay exact, and files name their layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.files.tensors import read_header
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.models import find
from tests.hub.checkpoints import tiny_transformer

GAIN = "model.layers.0.input_layernorm.weight"
TOKENS = mx.array([[1, 5, 9, 2, 7, 3]])


def saved(folder: Path, name: str, **keys: Any) -> Path:
    architecture = find(name)
    mx.random.seed(2)
    config = architecture.config.from_hub({**architecture.tiny, "initializer_range": 0.1, **keys})
    save_model(folder, architecture.build(config))
    return folder


def edit(
    folder: Path,
    change: Callable[[str, mx.array], mx.array],
    metadata: dict[str, str] | None = None,
) -> None:
    """Changes each tensor of a folder."""
    file = str(folder / "model.safetensors")
    tensors = {name: change(name, array) for name, array in dict(mx.load(file)).items()}
    mx.eval(tensors)
    mx.save_safetensors(file, tensors, metadata or {})


def saved_again(folder: Path, metadata: dict[str, str] | None) -> None:
    """Writes the weights of a folder once more, with other metadata."""
    edit(folder, lambda name, array: array, metadata)


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2", "kda", "gated_deltanet"])
def test_rates_stay_in_float32(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(saved(tmp_path / "m", name))
    formats = FloatFormats(dtype=mx.bfloat16)
    convert(source, tmp_path / "out", formats=formats)
    dtypes = {
        name: entry.dtype for name, entry in open_checkpoint(tmp_path / "out").tensors.items()
    }
    rates = {each for each in dtypes if each.endswith((".A_log", ".dt_bias", ".D"))}
    assert rates and {dtypes[each] for each in rates} == {mx.float32}
    assert {dtypes[each] for each in dtypes.keys() - rates} == {mx.bfloat16}


def test_rates_of_16_bits_stay_in_these(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "qwen3_5_text")
    edit(folder, lambda name, array: array.astype(mx.bfloat16), {"format": "pt"})
    convert(open_checkpoint(folder), tmp_path / "out", formats=FloatFormats(dtype=mx.float16))
    dtypes = {entry.dtype for entry in open_checkpoint(tmp_path / "out").tensors.values()}
    assert dtypes == {mx.float16}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model with a weight that float16 cannot hold."""
    folder = tmp_path / "large"
    save_model(folder, tiny_transformer(linears=None))
    edit(folder, lambda name, x: mx.full(x.shape, 1e5, mx.bfloat16) if name == GAIN else x)
    return folder


def test_a_dtype_that_is_too_small_is_named_where_weights_are_loaded(large: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"'{GAIN}' must lie within the range of float16"):
        load_model(large, dtype=mx.float16)
    load_model(large, dtype=mx.bfloat16)


@pytest.mark.parametrize("to", ["mlx", "hf"])
def test_a_dtype_that_is_too_small_is_named_where_weights_are_written(
    large: Path, tmp_path: Path, to: Any
) -> None:
    formats = FloatFormats(dtype=mx.float16)
    with pytest.raises(CheckpointError, match=rf"'{GAIN}'.*float16.*--dtype bfloat16") as caught:
        convert(open_checkpoint(large), tmp_path / "out", to=to, formats=formats)
    assert ".mmfree" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_scale_of_trits_must_fit_too(tmp_path: Path) -> None:
    model = tiny_transformer()
    model.blocks[0].token_mixer.query_proj.weight *= 1e7
    save_model(tmp_path / "m", model)
    with pytest.raises(CheckpointError, match=r"q_proj.weight_scale.* within the range of float16"):
        load_model(tmp_path / "m", dtype=mx.float16)


def test_one_tap_needs_a_named_writer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "qwen3_5_text", linear_conv_kernel_dim=1)
    assert read_header(folder / "model.safetensors")[1] == {"format": "pt"}
    want, _ = load_model(folder)(TOKENS)

    def as_mlx_lm(name: str, array: mx.array) -> mx.array:
        is_gain = name.endswith("norm.weight") and "linear_attn" not in name
        return array + 1 if is_gain else array

    edit(folder, as_mlx_lm, {"format": "mlx"})
    assert mx.allclose(load_model(folder)(TOKENS)[0], want, atol=1e-5)
    saved_again(folder, None)
    with pytest.raises(CheckpointError, match="must name their writer under 'format'"):
        load_model(folder)


@pytest.mark.parametrize("to", ["mlx", "hf"])
def test_one_tap_is_converted(tmp_path: Path, to: Any) -> None:
    folder = saved(tmp_path / "m", "qwen3_5_text", linear_conv_kernel_dim=1)
    convert(open_checkpoint(folder), tmp_path / "out", to=to)
    want, got = (load_model(path)(TOKENS)[0] for path in (folder, tmp_path / "out"))
    assert mx.array_equal(got, want)
