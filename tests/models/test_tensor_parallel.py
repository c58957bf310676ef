"""Models split over two processes against the same models in one."""

import json
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.models.parts.tensor_parallel import shard
from tests.hub.checkpoints import tiny_transformer
from tests.models.split_models import MODELS
from tests.process_group import finish, start_group
from tests.tolerances import TOLERANCE, relative_error


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    outputs = finish(start_group(folder, 2, "-m", "tests.models.split_models"))
    assert [errors for _, errors in outputs] == ["", ""]
    return [json.loads(output) for output, _ in outputs]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    dtype = mx.float16 if "float16" in name else mx.float32
    for rank in ranks:
        whole, split = rank["models"][name]["whole"], rank["models"][name]["split"]
        error = relative_error(mx.array(split["logits"]), mx.array(whole["logits"]))
        assert error < TOLERANCE[dtype]
        if name.startswith("bitnet"):
            assert split["logits"] == whole["logits"]
        assert split["tokens"] == whole["tokens"]
    assert ranks[0]["models"][name]["split"] == ranks[1]["models"][name]["split"]


def test_each_process_keeps_its_half(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sizes = rank["models"]["bitnet at word boundaries"]
        assert 2 * sizes["split"]["bytes"] == sizes["whole"]["bytes"]


def test_ternary_products_are_exact_and_a_nan_stays(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["products"] == [True] * 8


def test_what_does_not_divide_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        adapter, heads, columns, recurrent = rank["refusals"]
        assert "LoRALinear. Fuse an adapter before." in adapter
        assert "must divide 3 key and value heads and 44 hidden columns but got 2." in heads
        assert "2 key and value heads and 45 hidden columns but got 2." in columns
        assert "in every block but got a MLGRU. Run it in one process." in recurrent


def test_a_group_of_one_changes_nothing() -> None:
    model = tiny_transformer("bitnet")
    linear = model.blocks[0].token_mixer.query_proj
    assert shard(model).blocks[0].token_mixer.query_proj is linear
