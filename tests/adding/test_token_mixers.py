"""A token mixer is one file, and the contract of its kind is asked of it without a word elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.states import DecodedStates, StoredStates, TailedStates

ROOT = Path(__file__).parents[2]
# the tests of the contract that a mixer must meet because of the capabilities that it declares
EACH = ("reach_every_parameter", "dtype_is_kept", "capabilities_are_declared")
CAUSAL = (
    "whole_equals_chunks",
    "past_only",
    "padding_changes_nothing",
    "padded_step",
    "rows_can_be_selected",
)
ASKED = {
    "LeakyAverage": (*EACH, *CAUSAL),
    "MeanOfAll": (*EACH, "sees_the_whole", "padding_around", "do_not_see_each_other"),
    "GateByMemory": (*EACH, *CAUSAL, "second_sequence_is_seen"),
}


@pytest.fixture(scope="module")
def passed() -> list[str]:
    """The cases of the contract that the new mixers pass, in a process that finds their files."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.adding.search_path", "-n", "0", "-v"),
            "--exhaustive",
            *("-p", "no:cacheprovider", "tests/token_mixers/contract"),
            *("-k", " or ".join(ASKED)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "PASSED" in line]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mixer", ASKED)
def test_the_contract_is_asked_of_a_new_mixer(mixer: str, passed: list[str]) -> None:
    own = [line for line in passed if mixer in line]
    for test in ASKED[mixer]:
        assert any(test in line for line in own), test
    assert not any("packed_samples" in line for line in own)


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        (Context, "token_mixers"),
        (StoredStates, "layers"),
        (DecodedStates, "layers"),
        (TailedStates, "layers"),
    ],
)
def test_the_pages_name_every_member(kind: type, page: str) -> None:
    text = (ROOT / "mlx_mmfree" / page / "README.md").read_text()
    members = {name for name in vars(kind) if not name.startswith("_")}
    if kind is Context:
        members |= {name for name in vars(Context()) if not name.startswith("_")}
    else:
        assert len(members) <= 8
    assert members and not {name for name in members if f"`{name}" not in text}


def test_the_page_shows_the_file() -> None:
    page = (ROOT / "mlx_mmfree" / "token_mixers" / "README.md").read_text()
    file = Path(__file__).parent / "token_mixers" / "leaky_average.py"
    assert f"```python\n{file.read_text()}```" in page
