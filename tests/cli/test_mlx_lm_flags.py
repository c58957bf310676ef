"""Every flag of mlx-lm's commands is ours too or is listed as left out, with a reason."""

import ast
import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlx_mmfree.cli.console import command_names

TABLE = Path(__file__).parents[2] / "docs" / "mlx_lm_flags.md"
COMMANDS = [
    "cache_prompt",
    "chat",
    "convert",
    "evaluate",
    "fuse",
    "generate",
    "lora",
    "perplexity",
    "upload",
]
OURS = [name for name in COMMANDS if name in command_names()]
ROW = re.compile(r"\| `(\w+)` \| ((?:`-[\w-]+`(?:, )?)+) \| (.+) \|")


def their_flags(name: str) -> set[str]:
    """The flags in the source of a command; some commands need packages to be imported."""
    spec = find_spec(f"mlx_lm.{name}")
    assert spec is not None and spec.origin is not None
    calls = [
        node
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    texts = [
        argument.value for c in calls for argument in c.args if isinstance(argument, ast.Constant)
    ]
    return {text for text in texts if text.startswith("-")}


def our_flags(name: str) -> set[str]:
    parser = importlib.import_module(f"mlx_mmfree.cli.{name}").build_parser()
    return set(parser._option_string_actions)


def left_out() -> dict[str, set[str]]:
    flags: dict[str, set[str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if match := ROW.fullmatch(line):
            flags.setdefault(match[1], set()).update(re.findall(r"`(-[\w-]+)`", match[2]))
    return flags


def test_the_source_names_the_flags_of_the_parser() -> None:
    from mlx_lm.chat import setup_arg_parser

    flags = set(setup_arg_parser()._option_string_actions) - {"-h", "--help"}
    assert their_flags("chat") == flags
    assert len(their_flags("evaluate")) > 10


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


def test_chat_has_the_same_defaults() -> None:
    from mlx_lm.chat import setup_arg_parser

    from mlx_mmfree.cli.chat import build_parser

    theirs, ours = setup_arg_parser().parse_args([]), build_parser().parse_args([])
    shared = set(vars(theirs)) & set(vars(ours)) - {"model"}
    assert {name: getattr(ours, name) for name in shared} == {
        name: getattr(theirs, name) for name in shared
    }
    assert {"temp", "top_p", "xtc_probability", "seed", "max_tokens"} <= shared
