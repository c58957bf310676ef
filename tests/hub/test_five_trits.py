"""Ternary weights with five trits a byte: the same bits again, in this library and in mlx-lm."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint.formats import five_trits
from mlx_mmfree.hub.checkpoint.load import OpenedModel
from mlx_mmfree.hub.publish.upload import plan_upload
from mlx_mmfree.models import Decoder
from mlx_mmfree.ops import pack_ternary
from mlx_mmfree.ops.host_blocks import has_valid_codes
from tests.hub.checkpoints import (
    TOKENS,
    edit_json,
    edit_tensors,
    refused,
    tiny_model,
    tiny_transformer,
    weight_only,
)
from tests.hub.test_hybrid_to_mlx import MODELS, written
from tests.hub.test_to_mlx import BIG, mlx_lm_model, same_parameters, stored
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

GATE = "model.layers.0.mlp.gate_proj.weight"
SIZES = [(3, 1), (4, 5), (7, 31), (2, 32), (3, 64), (5, 65), (3, 79), (2, 80), (3, 96), (2, 1000)]


def five(folder: Path, model: Decoder | None = None) -> Path:
    """A model in MLX's format, `two`, and the folder of the same with five trits a byte."""
    save_model(folder / "s", model or tiny_model())
    convert(open_checkpoint(folder / "s"), folder / "two", check=False)
    convert(open_checkpoint(folder / "two"), folder / "five", trits_per_byte=5, check=False)
    return folder / "five"


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_every_trit_has_its_digit(rows: int, columns: int) -> None:
    trits = np.random.default_rng(columns).integers(-1, 2, (rows, columns))
    words = pack_ternary(mx.array(trits.astype(np.float32)))
    packed = five_trits.pack(words, columns)
    want = [
        [
            sum((row[j + n] + 1 if j + n < columns else 1) * 3**n for n in range(5))
            for j in range(0, columns, 5)
        ]
        for row in trits.tolist()
    ]
    assert packed.dtype == mx.uint8 and packed.tolist() == want
    assert mx.array_equal(five_trits.unpack(packed, columns), words)
    for byte in range(243, 256):
        damaged = packed + 0
        damaged[rows // 2, packed.shape[1] // 2] = byte
        assert not has_valid_codes(five_trits.unpack(damaged, columns), columns)
    if columns % 5:
        other = want[-1][-1] - 81
        damaged = packed + 0
        damaged[-1, -1] = other
        assert not has_valid_codes(five_trits.unpack(damaged, columns), columns)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "make",
    [
        tiny_model,
        tiny_transformer,
        lambda: tiny_transformer(**BIG),
        lambda: tiny_transformer("bitnet", tie_word_embeddings=True),
    ],
    ids=["hgrn_bit", "llama", "llama of whole groups", "bitnet"],
)
def test_round_trip_and_mlx_lm(tmp_path: Path, make: Any) -> None:
    folder = five(tmp_path, make())
    assert same_parameters(folder, tmp_path / "two")
    assert json.loads((folder / "config.json").read_text())["model_file"] == "mmfree_model.py"
    assert (folder / "mmfree_model.py").exists() and not (
        folder / "ternary_scales.safetensors"
    ).exists()
    convert(open_checkpoint(folder), tmp_path / "again", check=False)
    two, again = stored(tmp_path / "two"), stored(tmp_path / "again")
    assert two.keys() == again.keys()
    assert all(mx.array_equal(two[name], again[name]) for name in two)
    # stock mlx-lm, by the files in the folder alone
    theirs = mlx_lm_model(folder)
    loaded = dict(tree_flatten(theirs.parameters()))
    assert all(mx.array_equal(two[name], loaded[name]) for name in two)
    assert relative_error(theirs(TOKENS), weight_only(folder)(TOKENS)[0]) <= TOLERANCE[mx.float32]


def test_a_folder_is_replaced(tmp_path: Path) -> None:
    folder = five(tmp_path, tiny_model())
    # what such folders brought for mlx-lm before it was one file
    (folder / "five_trits.py").touch()
    convert(open_checkpoint(tmp_path / "two"), folder, overwrite=True, check=False)
    assert not (folder / "five_trits.py").exists() and (folder / "mmfree_model.py").exists()


def test_a_hybrid_with_dense_linears(tmp_path: Path) -> None:
    two = written(tmp_path, "partly", **MODELS["each"])
    convert(open_checkpoint(two), tmp_path / "five", trits_per_byte=5)
    theirs = (mlx_lm_model(folder)(TOKENS) for folder in (two, tmp_path / "five"))
    assert mx.array_equal(*theirs)


def test_bfloat16_scales_are_exact_here_and_rounded_in_mlx_lm(tmp_path: Path) -> None:
    model = tiny_model()
    model.set_dtype(mx.bfloat16)
    folder = five(tmp_path, model)
    assert same_parameters(folder, tmp_path / "two")
    assert mx.array_equal(mlx_lm_model(folder)(TOKENS), mlx_lm_model(tmp_path / "two")(TOKENS))


def test_other_variants_are_made_of_it(tmp_path: Path) -> None:
    folder = five(tmp_path, tiny_transformer(hidden_size=256, intermediate_size=512, head_dim=64))
    edit_json(folder / "config.json", eos_token_id=1)
    convert(open_checkpoint(folder), tmp_path / "hf", to="hf")
    original = load_model(folder)
    for path, module in load_model(tmp_path / "hf").named_modules():
        if "scale" in module:
            assert mx.array_equal(module.weight, dict(original.named_modules())[path].weight)


def test_sizes_and_card(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=160, intermediate_size=320)
    save_model(tmp_path / "s", model)
    report = convert(open_checkpoint(tmp_path / "s"), tmp_path / "five", trits_per_byte=5)
    group = report.groups["ternary matrices"]
    # two blocks of four projections, a gate and its way down, and the head
    weights = 2 * (4 * 160 * 160 + 640 * 160 + 160 * 320) + 40 * 160
    assert group.weights == weights
    assert group.target_bytes == weights // 5 + 13 * 4
    plan = plan_upload(tmp_path / "five", "me/five")
    assert plan.card is not None and "5 trits a byte, 1.6 bits each" in plan.card
    assert {"mmfree_model.py"} <= set(plan.files)


class TestUnpacked:
    """In memory, weights have 2 bits."""

    @pytest.mark.parametrize("make", [tiny_model, tiny_transformer])
    def test_the_same_bits(self, tmp_path: Path, make: Any) -> None:
        folder = five(tmp_path, make())
        two, unpacked = load_model(tmp_path / "two"), load_model(folder)
        found = tree_flatten(unpacked.parameters())
        assert all(array.dtype != mx.uint8 for _, array in found)
        assert OpenedModel(open_checkpoint(folder)).nbytes == sum(
            array.nbytes for _, array in found
        )
        for tokens in (TOKENS, TOKENS[:1, :1]):
            assert mx.array_equal(two(tokens)[0], unpacked(tokens)[0])
        save_model(tmp_path / "saved", unpacked)
        assert same_parameters(tmp_path / "saved", tmp_path / "two")

    @pytest.mark.parametrize(("index", "byte"), [((7, 2), 243), ((7, 2), 255), ((3, -1), 2)])
    def test_damaged_bytes(self, tmp_path: Path, index: Any, byte: int) -> None:
        file = five(tmp_path, tiny_model(hidden_size=32)) / "model.safetensors"
        weight = np.array(stored(file.parent)[GATE])
        assert weight[index] != byte
        weight[index] = byte
        edit_tensors(file, **{GATE: mx.array(weight)})
        why = f"'{GATE}' .* must hold ternary codes"
        with pytest.raises(CheckpointError, match=why):
            load_model(file.parent)


class TestRefused:
    def test_a_model_without_ternary_linears(self, tmp_path: Path) -> None:
        save_model(tmp_path / "s", tiny_transformer(linears=None))
        with pytest.raises(
            UnsupportedModelError, match="'trits_per_byte' must be 4 for this model"
        ):
            convert(open_checkpoint(tmp_path / "s"), tmp_path / "m", trits_per_byte=5)
        assert not (tmp_path / "m").exists()

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda w: w[:, :-1], r"must have shape \(80, 5\)"),
            (lambda w: w[:-1], r"must have shape \(80, 5\)"),
            (lambda w: w.astype(mx.uint32), "must be uint8 but is uint32"),
            (lambda w: mx.maximum(w, 243), "must hold ternary codes"),
        ],
        ids=["columns", "rows", "dtype", "bytes"],
    )
    def test_damaged_tensors(self, tmp_path: Path, change: Any, why: str) -> None:
        file = five(tmp_path) / "model.safetensors"
        edit_tensors(file, **{GATE: change(stored(file.parent)[GATE])})
        refused(file.parent, f"tensor '{GATE}' .*{why}")

    def test_one_byte_in_mlx_lm(self, tmp_path: Path) -> None:
        file = five(tmp_path) / "model.safetensors"
        weight = np.array(stored(file.parent)[GATE])
        weight[7, 2] = 243
        edit_tensors(file, **{GATE: mx.array(weight)})
        with pytest.raises(ValueError, match=f"Tensor '{GATE}' must hold no byte above 242"):
            mlx_lm_model(file.parent)
        edit_tensors(file, **{GATE: mx.array(weight[:, :-1])})
        with pytest.raises(ValueError, match=rf"Tensor '{GATE}' must be uint8 of shape \(80, 5\)"):
            mlx_lm_model(file.parent)

    def test_a_file_that_ends_early(self, tmp_path: Path) -> None:
        file = five(tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        refused(file.parent, "ends before tensor")

    @pytest.mark.parametrize("keys", [{"trits_per_byte": 6}, {"bits": 2}, {"format_version": 2}])
    def test_other_descriptions(self, tmp_path: Path, keys: dict[str, int]) -> None:
        file = five(tmp_path) / "config.json"
        described = json.loads(file.read_text())["quantization_config"]
        edit_json(file, quantization_config=described | keys)
        with pytest.raises(UnsupportedModelError, match="'quantization_config' must be"):
            load_model(file.parent)

    @pytest.mark.parametrize("described", ["a", 23, [5], {"trits_per_byte": 5}])
    def test_no_description(self, tmp_path: Path, described: Any) -> None:
        save_model(tmp_path / "s", tiny_model())
        edit_json(tmp_path / "s" / "config.json", quantization_config=described)
        with pytest.raises(UnsupportedModelError, match="'quantization_config' must be"):
            load_model(tmp_path / "s")

    def test_a_lost_description(self, tmp_path: Path) -> None:
        file = five(tmp_path) / "config.json"
        edit_json(file, quantization_config=...)
        refused(file.parent, "must say in 'quantization_config'")
        edit_json(file, quantization=...)
        refused(file.parent, "must say in 'quantization_config'")
