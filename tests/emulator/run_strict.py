"""Runs the tests of the Metal kernels in a stricter emulator.

    MLX_MMFREE_STRICT_EMULATOR=<folder> python tests/emulator/run_strict.py

The folder holds a module `emu` with `run` and `Options`, as tests/ops/conftest.py calls them.
"""

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    if "MLX_MMFREE_STRICT_EMULATOR" not in os.environ:
        sys.exit(__doc__)
    os.chdir(Path(__file__).parents[2])
    # a module from elsewhere need not be free of warnings
    quiet = [
        "-W",
        "ignore::ResourceWarning",
        "-W",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ]
    files = [
        "tests/ops/test_metal.py",
        "tests/ops/test_metal_fused.py",
        "tests/ops/test_metal_tiles.py",
        "tests/ops/test_bit_linear_tuning.py",
        "tests/ops/test_split_inputs.py",
        "tests/ops/test_plain_read.py",
        "tests/ops/test_scan_of_gpus.py",
        "tests/ops/test_gated_delta_rule.py",
        "tests/ops/test_gated_delta_net.py",
        "tests/ops/test_gathered.py",
        "tests/ops/test_gated_linear_attention.py",
        "tests/ops/test_attention_tail.py",
        "tests/ops/test_codes_on_metal.py",
        "tests/ops/test_hadamard.py",
        "tests/ops/test_attention_gradient.py",
        # with other shapes and values each time
        "tests/ops/test_properties.py",
    ]
    sys.exit(pytest.main(["--exhaustive", *files, *quiet, *sys.argv[1:]]))
