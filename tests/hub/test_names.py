"""Names on disk and in memory."""

import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.hub.names import WeightNames
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import find
from tests.hub.checkpoints import tiny_model

TABLE = {
    "model.norm.weight": "norm.weight",
    "model.layers.{}.proj": "blocks.{}.inner.proj",
    "model.layers.{}.experts.{}.up": "blocks.{}.experts.{}.up_proj",
    "model.layers.{}.gate.0": "blocks.{}.gate_down_proj",
    "model.layers.{}.gate.1": "blocks.{}.gate_proj",
    "model.layers.{}.proj.unused": None,
    "positions.0": "positions.lines",
    "positions.1": "positions.columns",
    "lm_head": "head",
}


@pytest.mark.parametrize(
    ("disk", "memory"),
    [
        ("model.norm.weight", "norm.weight"),
        ("model.layers.12.proj.weight", "blocks.12.inner.proj.weight"),
        ("model.layers.0.proj.norm.weight", "blocks.0.inner.proj.norm.weight"),
        ("model.layers.0.proj.weight_scale", "blocks.0.inner.proj.scale"),
        ("model.layers.3.experts.7.up.weight", "blocks.3.experts.7.up_proj.weight"),
        ("model.layers.31.gate.0.weight", "blocks.31.gate_down_proj.weight"),
        ("model.layers.1.gate.1.norm.2.weight", "blocks.1.gate_proj.norm.2.weight"),
        ("positions.1", "positions.columns"),
        ("lm_head.weight", "head.weight"),
        ("lm_head", "head"),
    ],
)
def test_translates_both_ways(disk: str, memory: str) -> None:
    names = WeightNames(TABLE)
    assert names.to_memory(disk) == memory
    assert names.to_disk(memory) == disk


@pytest.mark.parametrize(
    "name",
    ["", "x", "model.norm", "model.layers.1", "model.layers.a.proj", "model.layers.1.gate.2"],
)
def test_unknown_names(name: str) -> None:
    names = WeightNames(TABLE)
    assert names.to_memory(name) is None
    assert not names.is_unused(name)
    with pytest.raises(KeyError):
        names.to_disk(name)


def test_unused_tensors_have_no_name_in_memory() -> None:
    names = WeightNames(TABLE)
    assert names.is_unused("model.layers.4.proj.unused")
    assert names.to_memory("model.layers.4.proj.unused") is None


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"conv_size": 4},
        {"conv_size": 4, "share_conv_kernel": False},
        {"tie_word_embeddings": True},
        {"linear_class": "dense"},
        {"use_lower_bound": False},
    ],
    ids=str,
)
def test_tables_cover_every_parameter(options: dict[str, object], is_packed: bool) -> None:
    model = tiny_model(**options)
    if is_packed:
        pack_linears(model)
    names = WeightNames(find("hgrn_bit").weight_names)
    memory = [name for name, _ in tree_flatten(model.parameters())]
    disk = [names.to_disk(name) for name in memory]
    assert [names.to_memory(name) for name in disk] == memory
    assert len(set(disk)) == len(disk)
