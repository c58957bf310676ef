"""Bonsai 2 in its widths: a rotated twin computes what the weights without a rotation do."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.files.gguf_file import read_gguf
from mlx_mmfree.hub import load_model, open_checkpoint
from mlx_mmfree.hub.conversion.convert import convert
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.rotated import RotatedLinear
from tests.hub.checkpoints import edit_json, edit_tensors
from tests.hub.rotated_twins import (
    PACKING,
    Shape,
    draw,
    packing,
    rotated_back,
    write_folded,
    write_gguf_in,
    write_plain,
    write_prism,
)
from tests.hub.test_qwen35_to_gguf import write_tokenizer
from tests.tolerances import TOLERANCE, relative_error

TOKENS = mx.array([[1, 5, 9, 2, 7, 3, 30, 41]])
SMALL = Shape(256, 512, 128)
WIDTHS = [
    Shape(2048, 2048, 2048, keys=4, layers=1),
    Shape(2560, 512, 512, is_tied=True),
    Shape(4096, 4096, 4096, layers=1),
    Shape(5120, 1024, 1024, layers=1),
]
TWINS = [
    SMALL,
    Shape(256, 512, 256, keys=2, values=2, is_tied=True),
    Shape(512, 256, 128, keys=4, values=4),
]


def logits(source: Path) -> mx.array:
    return load_model(source, dtype=mx.float32)(TOKENS)[0]


GGUF_TYPES = ["F16", "PTQ1_0", "Q2_0 in groups of 64", "Q2_0 in groups of 128"]
"""The types of the published files, beside PQ2_0, which the library writes."""


def in_gguf(folder: Path, target: Path) -> Path:
    write_tokenizer(folder)
    convert(open_checkpoint(str(folder)), target, to="gguf", gguf_type="PQ2_0", check=False)
    [file] = target.glob("*.gguf")
    return file


def in_every_type(folder: Path, target: Path) -> Iterator[Path]:
    """A file in each of the published types, one at a time, since wide ones fill the disk."""
    source = in_gguf(folder, target)
    yield source
    for kind in GGUF_TYPES:
        yield (file := write_gguf_in(kind, target / f"{kind}.gguf", source))
        file.unlink()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", TWINS, ids=str)
def test_every_format_computes_what_the_plain_weights_do(tmp_path: Path, shape: Shape) -> None:
    want = logits(write_plain(tmp_path / "plain", shape))
    folded = write_folded(tmp_path / "folded", shape)
    folders = [folded, write_prism(tmp_path / "prism", shape)]
    for format in chain(folders, in_every_type(folded, tmp_path / "gguf")):
        assert relative_error(logits(format), want) <= 2e-5, format
        kinds = [type(each) for each in matrices(load_model(format)).values()]
        rotated = sum(issubclass(kind, RotatedLinear) for kind in kinds)
        assert rotated == len(shape.matrices()), format


@pytest.mark.sample(2)
def test_published_types_compute_in_one_dtype_and_become_the_same_file(tmp_path: Path) -> None:
    source = in_gguf(write_folded(tmp_path / "m", SMALL), tmp_path / "g")
    want = load_model(source)(TOKENS)[0]
    for kind in GGUF_TYPES:
        file = write_gguf_in(kind, tmp_path / f"{kind}.gguf", source)
        got = load_model(file)(TOKENS)[0]
        assert got.dtype == want.dtype
        assert relative_error(got, want) <= TOLERANCE[mx.float32], kind
        if "64" not in kind:  # a scale for 64 inputs is no type of rotated weights that is written
            report = convert(open_checkpoint(str(file)), tmp_path / kind, to="gguf")
            assert report.logits_difference == 0


@pytest.mark.parametrize("shape", TWINS, ids=str)
def test_gguf_names_the_order_and_the_head_only_where_there_is_one(
    tmp_path: Path, shape: Shape
) -> None:
    file = in_gguf(write_folded(tmp_path / "m", shape), tmp_path / "g")
    metadata, stored = read_gguf(file)
    grouped = metadata.get("prism.hadamard.gdn_v_grouped")
    assert grouped is (True if shape.values > shape.keys else None)
    assert metadata["prism.hadamard.version"] == (2 if shape.is_tied else 1)
    assert ("output.weight" in stored) is not shape.is_tied


@pytest.mark.interop
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_twins_of_each_width_compute_what_transformers_does(tmp_path: Path, shape: Shape) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plain = write_plain(tmp_path / "plain", shape)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        want = mx.array(model(torch.tensor(TOKENS.tolist()), use_cache=False).logits.numpy())
    del model
    folded = write_folded(tmp_path / "folded", shape)
    folders = [folded, write_prism(tmp_path / "prism", shape)]
    for format in chain(folders, in_every_type(folded, tmp_path / "gguf")):
        assert relative_error(logits(format), want) <= 2e-5, format


@pytest.mark.sample(1)
@pytest.mark.usefixtures("unfused")  # mlx-lm lets MLX fuse its operations
@pytest.mark.parametrize(
    "shape", [Shape(512, 1024, 512), *(replace(each, layers=2) for each in WIDTHS)], ids=str
)
def test_mlx_lm_computes_the_same_but_for_its_rounding(tmp_path: Path, shape: Shape) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    folder = write_prism(tmp_path / "m", shape)
    theirs, _ = load_with_mlx_lm(folder)
    # it rounds rows of the embedding to float16
    assert relative_error(logits(folder), theirs(TOKENS)) <= TOLERANCE[mx.float16]


@pytest.mark.parametrize("is_gguf", [False, True])
def test_other_floats_are_rotated_back(tmp_path: Path, is_gguf: bool) -> None:
    source = write_folded(tmp_path / "m", SMALL)
    rotated, _ = draw(SMALL)
    rng = np.random.default_rng(3)
    name = "model.layers.0.mlp.up_proj"
    other = rng.normal(0, 0.05, rotated[name].shape).astype(np.float16)
    if is_gguf:
        source = write_gguf_in("F16", tmp_path / "F16.gguf", in_gguf(source, tmp_path / "g"))
        _, stored = read_gguf(source)
        with source.open("r+b") as file:
            file.seek(stored["blk.0.ffn_up.weight"].start)
            file.write(other.tobytes())
    else:
        edit_tensors(source / "model.safetensors", **{f"{name}.weight": mx.array(other)})
    layer = matrices(load_model(source))["blocks.0.channel_mixer.up_proj"].layer
    want = mx.array(rotated_back(other, SMALL.block))
    assert relative_error(layer.weight, want) <= TOLERANCE[mx.float32]


def test_signs_may_all_be_one(tmp_path: Path) -> None:
    folder = write_folded(tmp_path / "m", SMALL)
    described = packing(SMALL)
    signs = {width: [1] * len(values) for width, values in described["signs"].items()}
    (folder / PACKING).write_text(json.dumps(described | {"signs": signs}))
    want = logits(folder)
    transform = described["transform"] | {"sign_mode": "identity"}
    (folder / PACKING).write_text(json.dumps(described | {"signs": None, "transform": transform}))
    assert mx.array_equal(logits(folder), want)


def without(described: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name != key}


DESCRIBED = packing(SMALL)
FIRST = DESCRIBED["tensors"][0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 4}, "'schema_version' must be 1 or 2 or 3"),
        ({"schema_version": True}, "'schema_version'"),
        ({"schema_version": 3}, "'tied_output' must be true"),
        ({"schema_version": 3, "tied_output": 1}, "'tied_output' must be true"),
        ({"schema_version": 3, "tied_output": True}, "'tied_output' must come with"),
        ({"tied_output": True}, "'tied_output' must be false"),
        ({"kind": "fold"}, "'kind'"),
        ({"status": None}, "'status'"),
        ({"transform": None}, "'transform'"),
        ({"transform": without(DESCRIBED["transform"], "name")}, "'name' of 'transform'"),
        ({"transform": DESCRIBED["transform"] | {"block_size": 96}}, "'block_size'"),
        ({"transform": DESCRIBED["transform"] | {"block_size": 128.0}}, "'block_size'"),
        ({"transform": DESCRIBED["transform"] | {"block_size": 512}}, "'block_size' must divide"),
        ({"transform": DESCRIBED["transform"] | {"sign_mode": "random"}}, "'sign_mode'"),
        ({"signs": None}, "'signs'"),
        ({"signs": {"256": [1] * 255}}, "'signs'"),
        ({"signs": {"256": [1] * 255 + [0]}}, "'signs'"),
        ({"signs": {"256": [1] * 255 + [1.0]}}, "'signs'"),
        ({"signs": {"256": [1] * 256}}, "'signs' must have signs for them"),
        ({"signs": {"wide": [1]}}, "'signs'"),
        ({"tensors": []}, "'tensors'"),
        ({"tensors": [FIRST, FIRST]}, "'tensors'"),
        ({"tensors": [{"name": 3}]}, "'tensors'"),
        ({"tensors": [without(FIRST, "axis")]}, "'axis' of"),
        ({"tensors": [FIRST | {"axis": 0}]}, "'axis' of"),
        ({"tensors": [FIRST | {"role": "fold"}]}, "'role' of"),
        ({"tensors": [FIRST | {"role": "inverse-after-lookup"}]}, "'embedding' of"),
        (
            {"tensors": [FIRST | {"name": "model.layers.7.mlp.up_proj.weight"}]},
            "must name matrices",
        ),
        ({"tensors": [FIRST | {"name": "model.norm.weight"}]}, "must name matrices"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = write_folded(tmp_path / "m", SMALL)
    (folder / PACKING).write_text(json.dumps(DESCRIBED | change))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words) as refused:
        load_model(folder)
    assert "would write nonsense" in str(refused.value)


def test_a_tied_head_needs_the_third_schema(tmp_path: Path) -> None:
    shape = Shape(256, 256, 128, is_tied=True)
    folder = write_folded(tmp_path / "m", shape, schema=2)
    with pytest.raises(CheckpointError, match="'schema_version' must be 3"):
        load_model(folder)
    (folder / PACKING).write_text(json.dumps(packing(shape)))
    load_model(folder)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="'tied_output' must come with"):
        load_model(folder)


def test_rows_that_are_no_longer_ternary_are_refused(tmp_path: Path) -> None:
    folder = write_folded(tmp_path / "m", SMALL)
    name = "model.layers.0.mlp.up_proj.weight"
    matrix = draw(SMALL)[0][name.removesuffix(".weight")].copy()
    matrix[-1, 0] = 0.777
    edit_tensors(folder / "model.safetensors", **{name: mx.array(matrix)})
    with pytest.raises(CheckpointError, match="must be ternary in groups of 128 inputs"):
        load_model(folder)
