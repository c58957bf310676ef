"""Hostile input ends in one clear line or a sound result, quickly and in little memory."""

import json
import sys
from collections import ChainMap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.hub import load_model
from tests.fuzz.classes.checkpoints import make_sources
from tests.fuzz.faulty_class import FAULTS
from tests.fuzz.run import Result, class_names, serve
from tests.fuzz.server import load_class
from tests.hub.checkpoints import split_safetensors, write_safetensors

CLASSES = class_names()
# its cases take as long as all others together
_LONGEST = "training_kills"
# an odd card is read as an empty one, and few texts cannot be encoded
_NEVER_REFUSED = (
    "encoding",
    "killed_downloads",
    "killed_uploads",
    "kills",
    "many_clients",
    "model_cards",
    "threads",
    _LONGEST,
)


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> dict[str, int]:
    """How many cases of each class are tried, of the classes that have a test in this run."""
    most = sys.maxsize if request.config.getoption("exhaustive") else 4
    asked = {item.name for item in request.session.items}
    names = [name for name in CLASSES if f"{test_hostile_input.__name__}[{name}]" in asked]
    return {name: min(load_class(name).count, most) for name in names}


@pytest.fixture(scope="module")
def results(counts: dict[str, int]) -> dict[str, Result]:
    """The results of some cases of these classes, in two processes."""
    parts = [[(name, 1, counts[name]) for name in [*counts][half::2]] for half in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return dict(ChainMap(*pool.map(serve, filter(None, parts))))


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name == _LONGEST else ())
        for name in CLASSES
    ],
)
def test_hostile_input(name: str, counts: dict[str, int], results: dict[str, Result]) -> None:
    assert results[name].faults == {}
    assert results[name].counts.total() == counts[name]
    # some damage is not harmless; otherwise this would test nothing
    assert results[name].counts["refused"] or name in _NEVER_REFUSED


@pytest.mark.exhaustive
def test_every_fault_is_found() -> None:
    name = "tests.fuzz.faulty_class"
    result = serve([(name, 0, len(FAULTS))])[name]
    assert result.counts == {"accepted": 1, "refused": 1, "fault": len(FAULTS) - 2}
    for seed, expected in list(enumerate(FAULTS))[2:]:
        assert expected in result.faults[seed]


def test_harmless_changes_change_nothing(tmp_path: Path) -> None:
    make_sources(tmp_path)
    for folder in tmp_path.iterdir():
        model = load_model(folder)
        tokens = mx.array([[1, 5, model.vocab_size - 1]])
        want = model(tokens)[0]
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"unknown": [1, {}]}))
        for file in folder.glob("*.safetensors"):
            header, data = split_safetensors(file)
            backwards = dict(reversed(header.items()))
            write_safetensors(file, json.dumps(backwards, indent=3).encode() + b" " * 99, data)
        assert mx.array_equal(load_model(folder)(tokens)[0], want), folder.name
