"""Rotated weights in GGUF files: with all of their metadata, or refused."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.files.gguf_file import read_gguf
from mlx_mmfree.hub import load_model
from mlx_mmfree.hub.checkpoint.formats.hadamard import MARK, check_rotation, rotation_of
from mlx_mmfree.hub.checkpoint.gguf_config import formats
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.layers.rotated import RotatedLinear
from mlx_mmfree.models import find

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FILE = GOLDENS / "gguf_qwen35_pq2_0_rotated" / "model.gguf"
FORMAT = formats()["qwen35"]
METADATA, STORED = read_gguf(FILE)
TENSORS = {name: (FILE, tensor) for name, tensor in STORED.items()}


@pytest.mark.parametrize("name", ["no_signs", "short_signs"])
def test_published_cases_are_refused_for_their_signs(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"sign_values' must hold .* signs of the rotation"):
        load_model(GOLDENS / f"refuse_gguf_rotated_{name}" / "model.gguf")


def changed(**changes: Any) -> dict[str, Any]:
    metadata = METADATA | {MARK + key: value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


SIGNS = METADATA[f"{MARK}sign_values"]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 3},
        {"version": True},
        {"version": None},
        {"version": 2},
        {"version": 2, "tied_output": 1},
        {"tied_output": True},
        {"transform": "hadamard"},
        {"axis": "output"},
        {"sign_mode": "random"},
        {"sign_mode": None},
        {"gdn_v_grouped": False},
        {"gdn_v_grouped": None},
        {"gdn_v_grouped": 1},
        {"block_size": None},
        {"block_size": 128.0},
        {"block_size": 96},
        {"block_size": 1},
        {"block_size": 2**20},
        {"weight_names": None},
        {"weight_names": []},
        {"weight_names": METADATA[f"{MARK}weight_names"] * 2},
        {"weight_names": "output.weight"},
        {"inverse_weight_names": [1]},
        {"sign_values": None},
        {"sign_values": []},
        {"sign_values": [*SIGNS, 1]},
        {"sign_values": [0, *SIGNS[1:]]},
        {"sign_values": [1.0, *SIGNS[1:]]},
        {"sign_values": "1"},
        {"sign_widths": None},
        {"sign_widths": [128, 128]},
        {"sign_widths": [128, -256, 512]},
        {"sign_widths": []},
        {"seed": 7},
    ],
)
def test_other_metadata_is_refused(changes: dict[str, Any]) -> None:
    check_rotation(METADATA, FORMAT)
    with pytest.raises((CheckpointError, UnsupportedModelError), match="write nonsense"):
        check_rotation(changed(**changes), FORMAT)


def test_an_architecture_that_reads_no_rotation_refuses_one() -> None:
    with pytest.raises(UnsupportedModelError, match="such a rotation of the weights is not read"):
        check_rotation(METADATA, formats()["minicpm"])


@pytest.mark.parametrize(
    ("keys", "values", "grouped", "is_read"),
    [
        (16, 16, None, True),
        (16, 16, False, True),
        (16, 16, True, True),
        (16, 16, 1, False),
        (16, 32, None, False),
        (16, 32, False, False),
        (16, 32, True, True),
    ],
)
def test_the_order_of_values_must_be_named_where_keys_are_shared(
    keys: int, values: int, grouped: Any, is_read: bool
) -> None:
    heads = {"qwen35.ssm.group_count": keys, "qwen35.ssm.time_step_rank": values}
    metadata = changed(gdn_v_grouped=grouped) | heads
    if is_read:
        check_rotation(metadata, FORMAT)
        return
    with pytest.raises(UnsupportedModelError, match=r"hadamard\.gdn_v_grouped' of rotated"):
        check_rotation(metadata, FORMAT)


def test_the_order_of_values_may_be_left_out_where_they_are_not_rotated() -> None:
    names = [name for name in METADATA[f"{MARK}weight_names"] if "ssm_out" not in name]
    check_rotation(changed(gdn_v_grouped=None, weight_names=names), FORMAT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_names": ["blk.9.ffn_up.weight"]}, "must hold the rotated matrix"),
        ({"weight_names": ["output_norm.weight"]}, "must hold the rotated matrix"),
        ({"version": 2, "tied_output": True}, "must hold no 'output.weight' and rotate"),
        ({"block_size": 1024}, "'prism.hadamard.block_size' must divide the 128 inputs"),
        ({"sign_widths": [384]}, "must have signs of the rotation for the 128 inputs"),
    ],
)
def test_each_rotated_matrix_has_signs(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        rotation_of(FILE, changed(**changes), TENSORS, FORMAT)


def test_signs_without_values_are_ones() -> None:
    metadata = changed(sign_mode="identity", sign_values=None, sign_widths=None)
    check_rotation(metadata, FORMAT)
    _, entries = rotation_of(FILE, metadata, TENSORS, FORMAT)
    assert entries and all(
        np.all(entry.decode(np.zeros(0, np.uint8)).view(np.float32) == 1) for entry in entries
    )


def test_every_named_matrix_is_rotated_by_its_signs() -> None:
    model = load_model(FILE, dtype=mx.float32)
    found = [each for each in matrices(model).values() if isinstance(each, RotatedLinear)]
    named = METADATA[f"{MARK}weight_names"] + METADATA[f"{MARK}inverse_weight_names"]
    assert len(found) == len(named)
    widths = np.cumsum([0, *METADATA[f"{MARK}sign_widths"]])
    for layer in found:
        number = METADATA[f"{MARK}sign_widths"].index(layer.input_dims)
        assert layer.signs.tolist() == SIGNS[widths[number] : widths[number + 1]]
        assert layer.block == METADATA[f"{MARK}block_size"]


@pytest.mark.parametrize(("keys", "values"), [(2, 6), (16, 48), (3, 3)])
def test_heads_of_values_are_sorted_by_their_keys(keys: int, values: int) -> None:
    config = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 8,
    }
    found = FORMAT.heads("model.layers.0.linear_attn.A_log", config)
    if keys == values:
        assert found is None
        return
    axis, order = found
    assert axis == 0 and sorted(order.tolist()) == list(range(values))
    # a head of the file reads the key of its number, one of the Hub the key of its group
    assert (order % keys).tolist() == [head // (values // keys) for head in range(values)]
    axis, wide = FORMAT.heads("model.layers.0.linear_attn.out_proj.weight", config)
    assert axis == 1 and (wide[::8] // 8).tolist() == order.tolist()
    axis, rows = FORMAT.heads("model.layers.0.linear_attn.in_proj_qkv.weight", config)
    assert axis == 0 and rows[: 8 * keys].tolist() == list(range(8 * keys))
    assert (rows[8 * keys :: 8] // 8 - keys).tolist() == order.tolist()
    assert FORMAT.heads("model.layers.0.self_attn.q_proj.weight", config) is None


def test_impossible_heads_are_refused() -> None:
    given = {key: 4 for key in FORMAT.own_keys} | {"ssm.inner_size": 6, "rope.freq_base": 1e7}
    with pytest.raises(CheckpointError, match=r"'qwen35\.ssm\.inner_size' must be a multiple"):
        FORMAT.read(given)
    assert find("qwen3_5_text").gguf["qwen35"] is FORMAT
