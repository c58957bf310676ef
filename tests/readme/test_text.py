"""The README files agree with the code: names, tables, trees, links and lengths."""

import json
import re
import tomllib
from dataclasses import MISSING, fields, replace
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import pytest
import yaml
from mlx.utils import tree_reduce

from mlx_mmfree.cli.parts.registry import command_names
from mlx_mmfree.evaluation.audit import certify
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.evaluation.bound import chip as chip_of
from mlx_mmfree.evaluation.bound import decoding_bound
from mlx_mmfree.generation.memory import memory_need
from mlx_mmfree.models import Architecture, EncoderDecoder, architectures, find
from mlx_mmfree.models.parts.architecture import Published
from mlx_mmfree.ops.backend.dispatch import operations, use_backend
from mlx_mmfree.training.settings import Settings, read_settings
from tests.evaluation.audit_models import needs_graphs
from tests.readme.documents import (
    BENCHMARKS,
    FOLDERS,
    MAIN,
    ROOT,
    Section,
    sections,
    table,
)
from tests.readme.environment import names_in_messages, names_read
from tests.readme.shapes import CONTEXT, GROUPS, SHAPES

PACKAGE = ROOT / "mlx_mmfree"
COMMANDS = PACKAGE / "cli" / "README.md"
TEXT = MAIN.read_text(encoding="utf-8")
HOUSE = PACKAGE / "README.md"
HUB = PACKAGE / "hub" / "README.md"
ORDER = [
    "Install",
    "Chat",
    "Models",
    "Fine-tune",
    "Serve",
    "Train",
    "Convert and upload",
    "Use in Python",
    "Where to go next",
]


def section(title: str, file: Path = MAIN) -> Section:
    return next(found for found in sections(file) if found.title == title)


def test_main_page_is_short_and_in_order() -> None:
    assert len(TEXT.split()) <= 900
    assert [found.title for found in sections(MAIN)][1:] == ORDER


def test_status_is_reported_once_and_linked_from_the_first_screen() -> None:
    screen = TEXT.partition("\n## ")[0]
    assert "Nothing has run on a Mac yet" in screen and "](.github/STATUS.md)" in screen
    status = (ROOT / ".github" / "STATUS.md").read_text(encoding="utf-8")
    assert "nothing ran on a Mac" in status and "No published checkpoint was loaded" in status


def test_one_spelling_of_the_two_first_commands() -> None:
    prefix, rest = TEXT.split("are the same two programs")
    assert "python generate.py" in prefix and "python convert.py" in prefix
    for text in (rest, *(file.read_text() for file in FOLDERS)):
        assert not re.search(r"python (generate|convert)\.py", text)


def test_all_commands_are_listed() -> None:
    listed = [row[0].strip("`") for row in table(section("All commands", COMMANDS))]
    assert sorted(listed) == sorted(command_names())


@pytest.mark.parametrize("file", [MAIN, *FOLDERS], ids=lambda file: file.parent.name)
def test_flags_exist(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    modules = [f"mlx_mmfree.cli.{name}" for name in command_names()]
    modules += [
        file.stem for file in BENCHMARKS.glob("*.py") if "def build_parser" in file.read_text()
    ]
    parsers = [import_module(name).build_parser() for name in modules]
    for parser in list(parsers):
        # a command may have others within it, such as `show model`
        within = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
        parsers += [other for choices in within for other in choices.values()]
    known = {flag for parser in parsers for flag in parser._option_string_actions}
    text = file.read_text(encoding="utf-8")
    named = re.findall(r"(?<=`)(--[\w-]+)", text)
    # the last is one of pytest here; flags of other programs stand after their names
    assert set(named) - known <= {"--trust-remote-code", "--exhaustive"}


def test_tree_shows_every_folder() -> None:
    tree = section("The house", HOUSE).blocks("")[0]
    shown = {line.split()[0]: line for line in tree.splitlines() if line.startswith("  ")}
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert set(shown) == folders
    for name, line in shown.items():
        inner = {f"{path.parent.name}/" for path in (PACKAGE / name).glob("*/__init__.py")}
        named = set(re.findall(r"([\w<>]+/)", line[len(name) + 2 :]))
        if name == "ops/":
            # one folder for each operation
            inner = {"<op>/", "backend/"}
        assert named == inner, name


def test_tree_has_the_order_of_imports() -> None:
    tree = section("The house", HOUSE).blocks("")[0]
    shown = re.findall(r"^  (\w+)/", tree, re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (order,) = (each["layers"] for each in contracts["contracts"] if each["id"] == "layers")
    floors = [floor.split(" | ") for floor in order]
    assert shown == [name for floor in floors for name in floor if name in shown]


def test_what_the_paragraphs_on_adding_name_exists() -> None:
    text = section("Add a part", HOUSE).text
    for package, *names in re.findall(r"`((?:layers|ops|models)\.[\w.]+)\.(\w+)`", text):
        module = import_module(f"mlx_mmfree.{package}")
        assert all(hasattr(module, name) for name in names), package
    for path in re.findall(r"`((?:tests|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for architecture in architectures().values():
        module = import_module(f"mlx_mmfree.models.{architecture.name}")
        assert module.ARCHITECTURE is architecture
        assert {"from_hub", "to_hub"} <= set(dir(architecture.config))
    defaults = [(field.default, field.default_factory) for field in fields(Architecture)]
    needed = [pair == (MISSING, MISSING) for pair in defaults].count(True)
    assert all(f"`{field.name}`" in text for field in fields(Architecture)[:needed])
    for name in command_names():
        assert {"HELP", "build_parser", "main"} <= set(dir(import_module(f"mlx_mmfree.cli.{name}")))
    for name, operation in operations().items():
        assert "reference" in operation.backends, name
        assert all(callable(each.run) for each in operation.backends.values()), name


def memory(model: Any) -> float:
    """The gigabytes that the library estimates for a text on a Mac."""
    weights = tree_reduce(lambda total, array: total + array.nbytes, model.parameters(), 0)
    # only shapes are looked at, so that no Metal device is needed
    with use_backend("metal"):
        return memory_need(model, weights, context_length=CONTEXT).total_bytes / 1e9


@pytest.mark.exhaustive
@needs_graphs
def test_table_of_models() -> None:
    """Memory and bounds are what the library computes from the published shapes."""
    found = section("Models", HUB)
    chips = ("M1", "M2 Max", "M4 Pro")
    assert f"{' / '.join(chips)} |" in found.text
    shown_names = []
    for cell, taken, bounds in table(found):
        (name,) = repositories(cell)
        shown_names.append(name)
        size, mac = map(float, taken.split(" / ")[1:])
        shape = dict(presets()[SHAPES[name]])
        if name in GROUPS:
            shape["quantization"] = {**shape["quantization"], "group_size": GROUPS[name]}
        needed = memory(skeleton(shape, mx.bfloat16))
        assert abs(size - needed) <= 0.1, (name, needed)
        assert mac == next(least for least in (8, 16, 24, 32) if 2 * size <= least), name
        token = certify(skeleton(shape), 512)
        most = [decoding_bound(token, chip_of(chip)).tokens_per_second for chip in chips]
        assert bounds == " / ".join(f"{ceil(rate):,}" for rate in most), name
    assert shown_names == list(SHAPES)
    rows = [" ".join(row) for row in table(found)]
    assert all(" ".join(row) in rows for row in table(section("Models")))


def repositories(cell: str) -> list[str]:
    """The repositories that a cell of a table names, each by its own name."""
    names = re.findall(r"`([\w.-]+/[^`]+)`", cell)
    published = dict.fromkeys(names, Published("", ""))
    return list(replace(find("hgrn_bit"), published=published).repositories)


def test_repositories_are_those_that_are_known() -> None:
    known = {name for each in architectures().values() for name in each.repositories}
    pages = {name for row in table(section("Models", HUB)) for name in repositories(row[0])}
    hub = section("Supported checkpoints", HUB)
    listed = repositories(hub.text.partition("### ")[0])
    assert sorted(listed) == sorted(name for name in known if not name.startswith("timm/"))
    assert pages <= known


COMPARED = {"R": "reference", "T": "transformers", "M": "mlx-lm", "V": "definition"}


def test_what_repositories_were_compared_with() -> None:
    known = {name: k for each in architectures().values() for name, k in each.repositories.items()}
    listed = section("Supported checkpoints", HUB).text.partition("### ")[0].split("\n- ")
    for entry in (" ".join(each.split()) for each in listed if "Stored:" in each):
        letters = {COMPARED[x] for x in re.findall(r"\b[RTMV]\b", entry.partition("Tested:")[2])}
        own = [
            known[name].compared_with.split(", ")
            for name in repositories(entry.partition("Stored:")[0])
        ]
        assert not own or {word for words in own for word in words} == letters, entry


def test_environment_variables() -> None:
    rows = table(section("Environment variables", PACKAGE / "platform" / "README.md"))
    ours: set[str] = set()
    others: set[str] = set()
    hub = Path(huggingface_hub.__file__).parent
    source = "".join((hub / name).read_text() for name in ("constants.py", "utils/_auth.py"))
    for names, readers, _ in rows:
        found = re.findall(r"`(\w+)`", names)
        (ours if "this library" in readers else others).update(found)
        if "huggingface_hub" in readers:
            assert all(f'"{name}"' in source for name in found), found
    assert names_read(PACKAGE) == ours
    assert names_in_messages(PACKAGE) <= ours | others


def test_what_an_exchange_costs() -> None:
    machines, links, operations_per_second = 8, (2 * 40, 2 * 80, 10, 1), 10e12
    *models, last = table(section("What an exchange costs", PACKAGE / "training" / "README.md"))
    presets = find("hgrn_bit").presets
    assert [f"mmfreelm-{row[0].lower()}" for row in models] == list(presets)
    for preset, (_, sent, *seconds) in zip(presets.values(), models, strict=True):
        architecture = find(preset["model_type"])
        model = architecture.build(architecture.config.from_hub(preset))
        weights = tree_reduce(lambda total, array: total + array.size, model.parameters(), 0)
        gigabytes = 2 * (machines - 1) / machines * weights * 4 / 1e9
        assert sent == f"{gigabytes:.1f} GB"
        for shown, gigabits in zip(seconds, links, strict=True):
            assert float(shown.removesuffix(" s")) == pytest.approx(
                8 * gigabytes / gigabits, rel=0.05
            )
    for shown, gigabits in zip(last[2:], links, strict=True):
        seconds_per_weight = 2 * (machines - 1) / machines * 4 * 8 / (gigabits * 1e9)
        assert float(shown.replace(",", "")) == pytest.approx(
            seconds_per_weight * operations_per_second / 6, rel=1e-3
        )


def test_settings_of_train() -> None:
    file = PACKAGE / "training" / "README.md"
    (text,) = section("The YAML file", file).blocks("yaml")
    shown = yaml.safe_load(text)
    known = {field.name: field for field in fields(Settings) if field.name != "root"}
    assert sorted(shown) == sorted(known)
    for name, field in known.items():
        if name not in ("model", "output", "stages"):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            default = list(default) if isinstance(default, tuple) else default
            assert shown[name] == default, name


def test_example_of_train_is_accepted(tmp_path: Path) -> None:
    file = PACKAGE / "training" / "README.md"
    (text,) = section("The YAML file", file).blocks("yaml")
    example = tmp_path / "train.yaml"
    example.write_text(text)
    assert read_settings(example).stages[0].weights == {"stories.txt": 3.0, "books.txt": 1.0}


def test_example_of_another_task_is_accepted(tmp_path: Path) -> None:
    file = PACKAGE / "training" / "README.md"
    (text,) = section("Other tasks", file).blocks("yaml")
    example = tmp_path / "train.yaml"
    example.write_text(text)
    settings = read_settings(example)
    assert settings.peak_learning_rate(256) == pytest.approx((256 * 400) ** -0.5)
    architecture = find(settings.model["model_type"])
    model = architecture.build(architecture.config.from_hub(settings.model))
    assert isinstance(model, EncoderDecoder) and model.start_token_id == 0


def test_lines_of_the_log_are_of_the_run() -> None:
    (text,) = section("The log", PACKAGE / "training" / "README.md").blocks("json")
    written = (ROOT / "examples" / "demo_model" / "log.jsonl").read_text().splitlines()
    for line in text.splitlines():
        assert json.loads(line) and line in written


def test_reading_of_the_environment_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'import os\nONE = "ONE"\nMANY = ("TWO", "THREE")\n'
        "os.environ.get(ONE)\n[os.environ[name] for name in MANY if name in os.environ]\n"
        '"FOUR" in os.environ\nos.getenv("FIVE")\n'
    )
    assert names_read(tmp_path) == {"ONE", "TWO", "THREE", "FOUR", "FIVE"}
    (tmp_path / "b.py").write_text("import os\ndef f(x):\n    return os.environ[x]\n")
    with pytest.raises(AssertionError, match=r"b\.py:3"):
        names_read(tmp_path)
