"""A token mixer is one file: what every mixer of its kind promises is asked of it at once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EACH = ("reach_every_parameter", "dtype_is_kept", "capabilities_are_declared")
CAUSAL = ("whole_equals_pieces", "past_only", "left_padding", "padded_step", "rows_can_be_selected")
ASKED = {
    "LeakyAverage": (*EACH, *CAUSAL),
    "MeanOfAll": (*EACH, "sees_the_whole", "padding_around", "do_not_see_each_other"),
    "GateByMemory": (*EACH, *CAUSAL, "second_sequence_is_seen"),
}


@pytest.mark.parametrize("mixer", ASKED)
def test_the_contract_is_asked_of_a_new_mixer(mixer: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.adding.search_path", "-n", "0", "-v"),
            *("-p", "no:cacheprovider", "tests/token_mixers/test_contract.py", "-k", mixer),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    passed = [line for line in done.stdout.splitlines() if "PASSED" in line]
    for test in ASKED[mixer]:
        assert any(test in line for line in passed), test
    assert not any("packed_samples" in line for line in passed)
