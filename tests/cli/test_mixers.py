"""`mmfree mixers`: the table of all token mixers."""

import json
from pathlib import Path

import pytest

from mlx_mmfree import spatial_mixers as spatial_package
from mlx_mmfree import token_mixers as package
from mlx_mmfree.cli.mixers import main
from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.models.parts.mixers import find_token_mixer, spatial_mixers, token_mixers
from mlx_mmfree.token_mixers import GQA, MLGRU


def test_each_mixer_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["mixer", "cost", "can", "be", "paper", "equation"]
    assert [line.split()[0] for line in lines] == sorted(token_mixers())
    line = next(line for line in lines if line.startswith("mlgru"))
    assert "causal, constant state, packing" in line and MLGRU.equation in line


def test_the_page_on_token_mixers_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--markdown"]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") == 2 + len(token_mixers())
    page = (Path(package.__file__).parent / "README.md").read_text()
    # mmfree mixers --markdown prints the table anew
    assert table in page


def test_the_page_on_spatial_mixers_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--spatial", "--markdown"]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") == 2 + len(spatial_mixers())
    page = (Path(spatial_package.__file__).parent / "README.md").read_text()
    # mmfree mixers --spatial --markdown prints the table anew
    assert table in page


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    mixers = {mixer.pop("name"): mixer for mixer in json.loads(capsys.readouterr().out)["mixers"]}
    assert mixers["gqa"] == {
        "equation": GQA.equation,
        "complexity": "T^2 D",
        "capabilities": ["causal", "bidirectional", "packing"],
        "paper": "arXiv 2305.13245",
    }


def test_mixers_are_found_by_name() -> None:
    assert find_token_mixer("gqa") is GQA
    for unknown in ("GQA", "none", 3, None):
        with pytest.raises(UnsupportedModelError) as error:
            find_token_mixer(unknown)
        assert "; mlgru (causal, constant state, packing); " in str(error.value)
