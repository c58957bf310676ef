"""A format of stored weights is one file: it is written, recognised, read, multiplied and converted."""

import json
import random
import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_unflatten

from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError, MMFreeError, UnsupportedModelError
from mlx_mmfree.files.reading import read_json_object, write_json
from mlx_mmfree.hub import load, load_model, save_model
from mlx_mmfree.hub.checkpoint.weight_format import weight_formats
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import Decoder
from tests.hub.checkpoints import GOLDENS, tiny_transformer

TOKENS = mx.array([[1, 7, 3, 39, 0]])


@pytest.fixture(scope="module")
def model(added: None) -> Decoder:
    """A dense model, whose linears but the head take the format."""
    from mlx_mmfree.hub.checkpoint.formats.signs import SignLinear

    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    made = tiny_transformer("llama", vocab_size=518, linears=None, **sizes)
    layers = {
        path: SignLinear.of(matrix.layer.weight, 32)
        for path, matrix in matrices(made).items()
        if matrix.is_plain and "blocks" in path
    }
    assert len(layers) > 6
    made.update_modules(tree_unflatten(list(layers.items())))
    return made


@pytest.fixture(scope="module")
def folder(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signs") / "model"
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


def test_it_is_known() -> None:
    assert "signs" in weight_formats()


def test_it_is_written_and_read(model: Decoder, folder: Path, tmp_path: Path) -> None:
    assert read_json_object(folder / "config.json")["sign_quantization"] == {"group_size": 32}
    loaded, tokenizer = load(folder)
    assert mx.array_equal(loaded(TOKENS)[0], model(TOKENS)[0])
    assert tokenizer.encode("The dog")
    save_model(tmp_path / "again", loaded)
    assert mx.array_equal(load_model(tmp_path / "again")(TOKENS)[0], model(TOKENS)[0])


def test_scales_take_the_dtype_that_is_asked_for_and_bits_stay(folder: Path) -> None:
    found = matrices(load_model(folder, dtype=mx.float16))
    layers = [matrix.layer for matrix in found.values() if "turned" in matrix.layer]
    assert {str(layer.scales.dtype) for layer in layers} == {"mlx.core.float16"}
    assert {str(layer.weight.dtype) for layer in layers} == {"mlx.core.uint8"}


def test_it_generates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(folder), "-p", "The dog", "-m", "5"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("to", ["mlx", "hf"])
def test_it_is_written_out_as_floats(
    to: str,
    model: Decoder,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "m"
    flags = ["--to", to]
    assert main(["convert", "--model", str(folder), "--mlx-path", str(target), *flags]) == 0
    capsys.readouterr()
    assert "sign_quantization" not in read_json_object(target / "config.json")
    assert mx.allclose(load_model(target)(TOKENS)[0], model(TOKENS)[0], atol=1e-4)


def test_a_folder_says_how_it_is_stored(folder: Path) -> None:
    from mlx_mmfree.hub.publish.model_card import storage_of

    assert storage_of(folder) == "Weights are signs with a scale for each group of inputs."


def changed(folder: Path, target: Path, **keys: object) -> Path:
    target.mkdir()
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    write_json(target / "config.json", {**read_json_object(folder / "config.json"), **keys})
    return target


def test_descriptions_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'group_size' of 16 or 32 but got"):
        load_model(changed(folder, tmp_path / "a", sign_quantization={"group_size": 7}))
    with pytest.raises(CheckpointError, match="must have shape"):
        load_model(changed(folder, tmp_path / "b", sign_quantization={"group_size": 16}))
    with pytest.raises(CheckpointError, match=re.escape("has unexpected tensors")):
        load_model(changed(folder, tmp_path / "c", sign_quantization=None))


def test_hostile_descriptions_end_in_one_line(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    values = [-1, 0, 2**40, 1.5, "x", [], {}, True, 10**30, {"group_size": []}]
    for number in range(20):
        entry = json.loads(json.dumps(rng.choice(values)))
        with pytest.raises(MMFreeError):
            load_model(changed(folder, tmp_path / str(number), sign_quantization=entry))
