"""Products with codes and the delta rule are timed; no test looks at how fast anything is."""

import re
from collections.abc import Iterator

import codes
import delta_rule
import mlx.core as mx
import pytest


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """The loop of mlx-lm would be compiled to machine code."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], r"\n\| rows \| 1 bit .*\| gradient, floats \|\n.*(\n\| [13] (\| \d+ ){10}\|){2}\n$"),
        (["--limits"], r"1 bits  one row .*GMAC/s.*\n(.*\n){4}2 bits  one row (.*\n){5}$"),
        (["--rotation"], r"rotations \d+ us, products \d+ us: \d+\.\d%"),
    ],
    ids=["rates", "limits", "rotation"],
)
def test_codes(
    flags: list[str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["codes.py", "--quick", *flags])
    codes.main()
    printed = capsys.readouterr().out
    assert re.search(shown, printed), printed


@pytest.mark.exhaustive
@pytest.mark.usefixtures("uncompiled")
def test_delta_rule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["delta_rule.py", "--quick"])
    delta_rule.main()
    own, gradients, *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"this library     forward +\d+\.\d ms    1\.00 times", own)
    assert re.fullmatch(r"this library     with gradients +\d+\.\d ms    1\.00 times", gradients)
    assert re.fullmatch(r"a token of states of 1 MiB: \d+% of the rate of copying them", last)
