"""Models split over two processes against the same models in one."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.models.parts.mixers import token_mixers
from mlx_mmfree.models.parts.tensor_parallel import shard
from tests.hub.checkpoints import tiny_transformer
from tests.models.split_mixers import WHOLE
from tests.models.split_models import MODELS
from tests.process_group import finish, start_group
from tests.tolerances import TOLERANCE, relative_error


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    outputs = finish(start_group(folder, 2, "-m", "tests.models.split_models"))
    assert [errors for _, errors in outputs] == ["", ""]
    return [json.loads(output) for output, _ in outputs]


@pytest.mark.exhaustive
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
        assert "channels of all mixers, 3, 6, 18, 36, 44, but got 2. Fitting numbers: 1." in heads
        assert "45, but got 2. Fitting numbers: 1." in columns
        assert "in every block but got a GRU. Run it in one process." in recurrent


def test_a_group_of_one_changes_nothing() -> None:
    model = tiny_transformer("bitnet")
    linear = model.blocks[0].token_mixer.query_proj
    assert shard(model).blocks[0].token_mixer.query_proj is linear


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_mixer_with_heads_or_channels_is_split(tmp_path: Path, size: int) -> None:
    outputs = finish(start_group(tmp_path, size, "-m", "tests.models.split_mixers"))
    assert [errors for _, errors in outputs] == [""] * size
    for output, _ in outputs:
        found = json.loads(output)
        named = {name.split(" ")[0] for name in found}
        assert named >= token_mixers().keys() - set(WHOLE)
        for name, metrics in found.items():
            assert metrics["error"] < TOLERANCE[mx.float32], name
            assert metrics.get("share", 0) < 0.8, name


def test_mixers_that_stay_whole_say_so() -> None:
    for name, mixer in token_mixers().items():
        assert (mixer.partition is None) == (name in (*WHOLE, "fnet", "pooling")), name
