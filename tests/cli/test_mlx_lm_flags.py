"""Every flag of mlx-lm's commands is ours too or is listed as left out, with a reason."""

import ast
import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli.parts.registry import command_names

TABLE = Path(__file__).with_name("mlx_lm_flags.md")
COMMANDS = [
    "cache_prompt",
    "chat",
    "convert",
    "evaluate",
    "fuse",
    "generate",
    "lora",
    "perplexity",
    "serve",
    "upload",
]
THEIR_NAMES = {"serve": "server"}
OURS = [name for name in COMMANDS if name in command_names()]
ROW = re.compile(r"\| `(\w+)` \| ((?:`-[\w-]+`(?:, )?)+) \| (.+) \|")


def their_arguments(name: str) -> dict[str, Any]:
    """The flags in the source of a command with their defaults; importing it would take long."""
    spec = find_spec("mlx_lm")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).with_name(f"{THEIR_NAMES.get(name, name)}.py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    flags: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            given = next((k.value for k in node.keywords if k.arg == "default"), None)
            default = constants.get(given.id) if isinstance(given, ast.Name) else given
            default = default.value if isinstance(default, ast.Constant) else default
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            flags |= {text: default for text in names if text.startswith("-")}
    return flags


def their_flags(name: str) -> set[str]:
    return set(their_arguments(name))


def our_flags(name: str) -> set[str]:
    parser = importlib.import_module(f"mlx_mmfree.cli.{name}").build_parser()
    return set(parser._option_string_actions)


def left_out() -> dict[str, set[str]]:
    flags: dict[str, set[str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if match := ROW.fullmatch(line):
            flags.setdefault(match[1], set()).update(re.findall(r"`(-[\w-]+)`", match[2]))
    return flags


def test_the_source_is_read() -> None:
    assert their_arguments("upload") == {"--path": "mlx_model", "--upload-repo": None}
    assert len(their_flags("generate")) > 30


@pytest.mark.parametrize("name", OURS)
def test_no_flag_is_missing_without_a_reason(name: str) -> None:
    assert their_flags(name) - our_flags(name) - left_out().get(name, set()) == set()


@pytest.mark.parametrize("name", OURS)
def test_the_table_is_up_to_date(name: str) -> None:
    listed = left_out().get(name, set())
    assert listed & our_flags(name) == set()
    assert listed - their_flags(name) == set()


def test_the_table_names_known_commands_only() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert rows and all(map(ROW.fullmatch, rows))
    assert set(left_out()) <= set(COMMANDS)


def test_chat_has_the_same_defaults_but_for_sampling() -> None:
    from mlx_mmfree.cli.chat import build_parser

    ours = build_parser()._option_string_actions
    theirs = {flag: value for flag, value in their_arguments("chat").items() if flag in ours}
    assert (theirs["--temp"], theirs["--seed"], theirs["--max-tokens"]) == (0.0, 0, 256)
    different = {flag for flag, value in theirs.items() if ours[flag].default != value}
    # what is not given is as the model's files or makers say
    left_open = {"--xtc-probability", "--xtc-threshold"}
    assert different == {"--model", "--temp", "--top-p", "--seed", *left_open}
    usual = build_parser().get_default("usual_sampling")
    assert all(usual[flag[2:].replace("-", "_")] == theirs[flag] for flag in left_open)
    assert "- `chat` samples its answers with `--temp 0.7 --top-p 0.9`" in TABLE.read_text("utf-8")
