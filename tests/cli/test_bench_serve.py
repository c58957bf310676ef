"""`mmfree bench serve`: what it prints, and which flags it refuses."""

import json
from typing import Any

import pytest

from mlx_mmfree.cli import main, serve

Captured = pytest.CaptureFixture[str]
SMALL = ["--clients", "1", "2", "--rows", "2", "--parked", "3", "--parked-tokens", "20", "--config"]


@pytest.mark.serve
def test_servers_are_measured(capsys: Captured) -> None:
    assert main(["bench", "serve", "--quick", "--json", *SMALL]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["settings"]["clients"] == [1, 2]
    own = [each["clients"] for each in shown["rates"] if each["program"] == "mlx_mmfree"]
    others = [each["program"] for each in shown["rates"] if each["first"] is None]
    assert own == [1, 2]
    assert others == ["scheduler without HTTP", "scheduler without HTTP and sessions"]
    for each in shown["rates"]:
        assert 0 < each["tokens_per_second"] <= each["best"]
    resumed = shown["resumed"]
    # each has two states, one of its prompt and one of what was written
    assert resumed["sessions"] >= 6 and 0.5 < resumed["cached"] < 1
    [parked] = shown["parked"]
    assert (parked["name"], parked["sessions"], parked["tokens"]) == ("packaged model", 3, 20)


def test_a_configuration_that_is_not_known_is_refused(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_PACKAGES", ())
    assert main(["bench", "serve", "--config", "nothing"]) == 2
    assert "--config must be of" in capsys.readouterr().err


def test_the_extra_is_named_where_it_is_not_installed(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_PACKAGES", ("no_package_of_that_name",))
    assert main(["bench", "serve"]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err
