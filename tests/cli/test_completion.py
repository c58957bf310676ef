"""Shells complete commands and flags."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mmfree.cli.parts.completion import whole_parser
from mlx_mmfree.cli.parts.registry import command_names

ROOT = Path(__file__).parents[2]


def test_the_parser_has_all_commands_and_the_flags_of_the_typed_one() -> None:
    parser = whole_parser("mmfree generate --mo")
    typed = parser.parse_args(["generate", "--model", "x"])
    assert typed.model == "x"
    for name in command_names():
        with pytest.raises(SystemExit) as ending:
            parser.parse_args([name, "--help"])
        assert ending.value.code == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mmfree gen", "generate"),
        ("mmfree chat --top", "--top-k"),
        ("mmfree help mod", "models"),
        ("mmfree generate --model own", "owner/name"),
        ("mmfree generate --model gen", "generate.py"),
        ("mmfree run own", "owner/name"),
        ("mmfree models --remove o", "owner/name"),
        ("mmfree show weights --model o", "owner/name"),
    ],
)
def test_a_shell_is_answered(line: str, expected: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    answer = tmp_path / "answer"
    # the protocol of argcomplete's hook, with a file for its descriptor
    subprocess.run(
        [sys.executable, "-m", "mlx_mmfree"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        env=os.environ
        | {
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        },
    )
    assert expected in [word.strip() for word in answer.read_text().split("\n")]
