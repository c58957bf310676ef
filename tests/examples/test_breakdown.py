"""Where the time of a prompt and of a decoded token goes."""

import json
from pathlib import Path

import breakdown
import mlx.core as mx
import pytest
from breakdown import Breakdown, Part, breakdown_lines, fastest, main

from mlx_mmfree import native
from mlx_mmfree.models import find
from mlx_mmfree.ops import rms_norm

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason="the compiled kernels are timed"
)


def test_kernels_are_timed_only_when_asked() -> None:
    times = native.kernels().operation_times
    times(False)
    mx.eval(rms_norm(mx.ones((4, 64)), None, eps=1e-6))
    assert times(True) == {}
    for _ in range(3):
        mx.eval(rms_norm(mx.ones((4, 64)), None, eps=1e-6))
    ((name, (runs, seconds, waited)),) = times(False).items()
    assert (name, runs) == ("RmsNorm", 3) and waited >= 0 and seconds > 0


def test_what_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "hgrn_bit", **find("hgrn_bit").tiny}))
    command = ["--quick", "--threads", "1", "--config", str(config)]
    assert main([*command, "--json"]) == 0
    prompt, token = json.loads(capsys.readouterr().out)
    for shown in (prompt, token):
        parts = shown["parts"]
        # two layers of four products, and a head
        assert (parts["BitLinear"]["runs"], parts["MlgruStep"]["runs"]) == (9, 2)
        assert 0 < sum(part["seconds"] for part in parts.values()) < shown["seconds"]
        assert shown["host_seconds"] > 0 and shown["threads"] == 1


def test_several_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "hgrn_bit", **find("hgrn_bit").tiny}))
    command = ["--quick", "--threads", "1", "--config", str(config), "--rows", "3"]
    assert main([*command, "--json"]) == 0
    prompt, token = json.loads(capsys.readouterr().out)
    assert token["name"].endswith("token of 3 texts after 16")
    assert token["parts"]["BitLinear"]["runs"] == prompt["parts"]["BitLinear"]["runs"] == 9


def test_the_fastest_round_and_what_is_left() -> None:
    found = [
        Breakdown("m", 2, whole, 4 - whole, 0.1, {"A": Part(3, whole / 2, whole / 10)})
        for whole in (3.0, 2.0, 2.5)
    ]
    whole = fastest(found)
    assert whole == Breakdown("m", 2, 2.0, 1.0, 0.1, {"A": Part(3, 1.0, 0.2)})
    head, first, rest, host = breakdown_lines(whole)
    assert head == "m, 2 threads: 2000.00 ms, its limit is 50% of that"
    assert first.split()[:3] == ["A,", "3", "runs"] and first.endswith("waited 10%")
    assert "1000.00 ms   50%" in rest and host.endswith("5% of one core")


def test_it_is_refused_without_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(breakdown.native, "unavailable", lambda: "they were not built")
    assert main(["--quick"]) == 2
    assert "cannot be measured: they were not built" in capsys.readouterr().err
