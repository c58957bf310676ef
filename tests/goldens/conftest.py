"""Runs every case of a folder of goldens: `pytest tests/goldens --goldens DIR`."""

from pathlib import Path
from typing import Any

import pytest

from tests.goldens.cases import DEFAULT_FOLDER, Case, find_cases, find_tokenizers, golden

# fixture: the tensor that a case must have for it
_NEEDS = {
    "chunk_case": "chunk_split",
    "gradient_case": "loss",
    "greedy_case": "greedy_ids",
    "hidden_case": "hidden_0",
    "low_precision_case": "logits_lowp",
    "padded_case": "attention_mask",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--goldens",
        default=str(DEFAULT_FOLDER),
        help="folder with golden cases (default: own copy)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folder = Path(metafunc.config.getoption("--goldens", str(DEFAULT_FOLDER)))
    if not folder.is_dir():
        raise pytest.UsageError(f"--goldens must be a folder but got '{folder}'")
    names = set(metafunc.fixturenames)
    if "model_case" in names:
        cases = [_parameter(case) for case in find_cases(folder)]
        metafunc.parametrize("model_case", cases, ids=str)
    for fixture, key in _NEEDS.items():
        if fixture in names:
            runnable = [case for case in find_cases(folder) if case.reason is None]
            supported = [case for case in runnable if key in golden(case.folder)]
            metafunc.parametrize(fixture, supported, ids=str)
    if "tokenizer_folder" in names:
        metafunc.parametrize(
            "tokenizer_folder", find_tokenizers(folder), ids=lambda path: path.name
        )
    if "ops_folder" in names:
        found = [folder / "ops"] if (folder / "ops").is_dir() else []
        metafunc.parametrize("ops_folder", found, ids=lambda path: path.name)


def _parameter(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.skip(case.reason) if case.reason else ())
