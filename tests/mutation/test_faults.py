"""The table of faults fits the package."""

import ast

import pytest

from tests.mutation.faults import FAULTS, Fault
from tests.mutation.plant import CHECKOUT


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_can_be_planted(fault: Fault) -> None:
    sound = (CHECKOUT / "mlx_mmfree" / fault.file).read_text(encoding="utf-8")
    assert sound.count(fault.text) == 1
    ast.parse(sound.replace(fault.text, fault.fault))
    assert all((CHECKOUT / "tests" / test).exists() for test in fault.tests)
