"""A damaged checkpoint gives one clear line or a sound model, quickly and in little memory."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.hub import load_model
from tests.fuzz.exercise import exercise
from tests.fuzz.mutations import make_sources
from tests.hub.checkpoints import split_safetensors, write_safetensors

COUNT = 300


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_sources(tmp_path_factory.mktemp("sources"))


def test_damaged_checkpoints(sources: list[Path], tmp_path: Path) -> None:
    loaded = [exercise(sources, tmp_path / "copy", seed)[0] for seed in range(COUNT)]
    # some damage is harmless, most is not; otherwise this would test nothing
    assert 0.02 * COUNT < sum(loaded) < 0.5 * COUNT


def test_harmless_changes_change_nothing(sources: list[Path]) -> None:
    tokens = mx.array([[1, 5, 600]])
    for folder in (source for source in sources if (source / "config.json").exists()):
        want = load_model(folder)(tokens)[0]
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"unknown": [1, {}]}))
        for file in folder.glob("*.safetensors"):
            header, data = split_safetensors(file)
            backwards = dict(reversed(header.items()))
            write_safetensors(file, json.dumps(backwards, indent=3).encode() + b" " * 99, data)
        assert mx.array_equal(load_model(folder)(tokens)[0], want), folder.name
