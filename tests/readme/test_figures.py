"""Tables of metrics have a command beside them, and the metrics of the first screen are its result."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from tests.evaluation.audit_models import needs_graphs
from tests.readme.documents import FOLDERS, MAIN, ROOT, Section, sections
from tests.tolerances import TOLERANCE

MEASURES = ("mmfree ", "python ")
"""How a command begins that can give a figure."""
_FIGURE = re.compile(
    r"\| [-+≈>]*\d[\d.,]*( ±.*| %.*| [a-zA-Z/]{1,9})? \|",
)
_BULLET = re.compile(r"^- \*\*(.*?)\.?\*\*(.*?)(?=^- |^\n)", re.DOTALL | re.MULTILINE)


def reasons() -> dict[str, str]:
    """The text under each bullet of the first screen, by its bold first words."""
    screen = MAIN.read_text(encoding="utf-8").partition("\n## ")[0]
    return {title: " ".join(text.split()) for title, text in _BULLET.findall(screen)}


def commands_in(text: str) -> list[str]:
    return [span for span in re.findall(r"`([^`]+)`", text) if span.startswith(MEASURES)]


def audit(command: str, capsys: pytest.CaptureFixture[str]) -> dict:
    program, *arguments = shlex.split(command)
    assert program == "mmfree" and main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def multiplications(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    found = audit(command, capsys)
    return [f"{found['float_multiplications'] / 1e6:.1f} million"]


def difference(command: str, _: object) -> list[str]:
    test = (ROOT / command.split()[-1]).read_text()
    assert "pytest.mark.interop" in test and "<= TOLERANCE[mx.float32]" in test
    return [f"{TOLERANCE[mx.float32]:.0e}".replace("e-0", "e-")]


def losses(command: str, _: object) -> list[str]:
    example = (ROOT / command.split()[1]).read_text()
    [pair] = re.findall(r"held-out loss (\S+) before, (\S+) after", example)
    return [" to ".join(pair)]


def recalled(command: str, _: object) -> list[str]:
    table = (ROOT / command.split()[1]).with_suffix("") / "table.json"
    runs = [
        run
        for run in json.loads(table.read_text())["runs"]
        if (run["part"], run["task"], run["linear"]) == ("table", "recall", "ternary")
    ]

    def share(model: str) -> float:
        own = [run for run in runs if run["model"] == model]
        first = [run for run in own if run["seed"] == 0]
        best = max(first, key=lambda run: run["value"])["learning_rate"]
        return 100 * mean(run["value"] for run in own if run["learning_rate"] == best)

    return [f"{min(map(share, ('delta_net', 'gated_delta_net', 'kda', 'rwkv7'))):.1f} %"]


def ratios(_: str, __: object) -> list[str]:
    page = ROOT / "examples" / "benchmarks" / "README.md"
    text = next(part.text for part in sections(page) if part.title == "Beside llama.cpp")
    prompts, decoding = re.findall(r"\*\*(\d\.\d+)[^*]*times\s+as\s+fast\*\*", text)
    return [f"{prompts} times", f"{decoding} times"]


def state_sizes(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    read = audit(command, capsys)["bytes"]["state_read"]
    return [f"{read / 1e3:.0f} kB"]


METRICS: dict[str, Callable[..., list[str]]] = {
    "MatMul-free models": multiplications,
    "Exact 8-bit activations": difference,
    "Fine-tuning of ternary and 1-bit weights": losses,
    "Recurrences that recall": recalled,
    "A CPU is enough": ratios,
    "Conversations cost kilobytes": state_sizes,
}


def test_every_reason_is_checked() -> None:
    assert list(reasons()) == list(METRICS)


@pytest.mark.sample(2)
@needs_graphs
@pytest.mark.parametrize("title", METRICS)
def test_metrics_of_the_first_screen(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = reasons()[title]
    command, *_ = commands_in(text)
    assert re.findall(r"\*\*(.*?)\*\*", text) == METRICS[title](command, capsys)


def enclosing(found: list[Section], index: int) -> list[Section]:
    """A section and those that it lies in."""
    lies_in = [found[index]]
    for section in reversed(found[:index]):
        if section.level < lies_in[-1].level:
            lies_in.append(section)
    return lies_in


@pytest.mark.parametrize("file", [MAIN, *FOLDERS], ids=lambda file: file.parent.name)
def test_a_table_of_metrics_has_a_command(file: Path) -> None:
    found = sections(file)
    for index, section in enumerate(found):
        rows = [line for line in section.text.splitlines() if line.startswith("|")]
        if sum(bool(_FIGURE.search(row)) for row in rows) > 1:
            texts = [part.text for part in enclosing(found, index)]
            lines = [line for text in texts for line in text.splitlines()]
            assert any(line.startswith(MEASURES) for line in lines) or any(map(commands_in, texts))
