"""An operation is one file with its backends, examples and costs, found without a word elsewhere."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.errors import BackendError
from mlx_mmfree.evaluation.audit.primitives import cost_of_kernel
from mlx_mmfree.ops import backend_report, use_backend
from mlx_mmfree.ops.backend.cost import Call, work
from mlx_mmfree.ops.inspection import operation_reports

ROOT = Path(__file__).parents[2]
OP = "mlx_mmfree.ops.leaky_sum"
X = mx.array([[[1.0], [2.0], [4.0]]])


def test_the_backend_that_fits_runs() -> None:
    from mlx_mmfree.ops.leaky_sum import leaky_sum

    assert leaky_sum(X, decay=0.5).flatten().tolist() == [1.0, 2.5, 5.25]
    with use_backend("reference"):
        assert leaky_sum(X, decay=0.0).flatten().tolist() == [1.0, 2.0, 4.0]
    with use_backend("chunked"), pytest.raises(BackendError, match="a decay above zero"):
        leaky_sum(X, decay=0.0)
    assert backend_report(OP, X, 0.5) == {"chunked": None, "reference": None}


def test_doctor_and_audit_know_it() -> None:
    assert operation_reports(rows=())["leaky_sum"] == {"chunked": None, "reference": None}
    cost = cost_of_kernel(Call("LeakySum", [X], [X], [True]))
    assert cost is not None and cost.work == work(multiply=3, add=3)


@pytest.mark.exhaustive
def test_it_makes_no_other_test_red() -> None:
    tests = [
        *("tests/ops/test_backends.py", "tests/ops/test_empty.py", "tests/ops/test_inspection.py"),
        *("tests/native/test_definitions.py", "tests/evaluation/test_audit_products.py"),
        "tests/cli/test_doctor.py",
    ]
    words = "example or every or each or case or json or declared"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.adding.search_path", "-n", "0", "-v"),
            "--exhaustive",
            *("-p", "no:cacheprovider", *tests, "-k", words),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert "on_its_backends[leaky_sum] PASSED" in done.stdout
