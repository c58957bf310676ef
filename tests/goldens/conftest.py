"""Runs every case of a folder of goldens: `pytest tests/goldens --goldens DIR`."""

from pathlib import Path

import pytest

from tests.goldens.cases import (
    DEFAULT_FOLDER,
    Case,
    find_cases,
    find_tokenizers,
    golden,
    is_embedding,
)
from tests.goldens.mixers.files import name_of, read

# each fixture, with the tensor that a case must have for it
_NEEDS = {
    "chunk_case": "chunk_split",
    "embedding_case": "last_hidden_state",
    "gradient_case": "loss",
    "greedy_case": "greedy_ids",
    "hidden_case": "hidden_0",
    "low_precision_case": "logits_lowp",
    "padded_case": "attention_mask",
    "padding_case": "pad.attention_mask",
}
# each fixture of a folder without a model, with its name
_FOLDERS = {
    "ops_folder": "ops",
    "newer_ops_folder": "ops_2026",
    "blocks_folder": "gguf_blocks",
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
        writing = [case for case in find_cases(folder) if not is_embedding(case.folder)]
        _parametrize(metafunc, "model_case", writing)
    for fixture, key in _NEEDS.items():
        if fixture in names:
            runnable = [case for case in find_cases(folder) if case.reason is None]
            supported = [
                case
                for case in runnable
                if key in golden(case.folder)
                and is_embedding(case.folder) == (fixture == "embedding_case")
            ]
            _parametrize(metafunc, fixture, supported)
    if "tokenizer_folder" in names:
        metafunc.parametrize(
            "tokenizer_folder", find_tokenizers(folder), ids=lambda path: path.name
        )
    for fixture, name in _FOLDERS.items():
        if fixture in names:
            found = [folder / name] if (folder / name).is_dir() else []
            metafunc.parametrize(fixture, found, ids=lambda path: path.name)
    if marker := metafunc.definition.get_closest_marker("golden"):
        files = sorted((folder / "mixers").rglob("*.safetensors"))
        values = [
            pytest.param(read(file), id=file.stem) for file in files if name_of(file) in marker.args
        ]
        metafunc.parametrize("file", values)


@pytest.fixture
def mixer_files(request: pytest.FixtureRequest) -> list[Path]:
    """The files of single mixers in the folder."""
    folder = Path(request.config.getoption("--goldens", str(DEFAULT_FOLDER)))
    return sorted((folder / "mixers").rglob("*.safetensors"))


def _parametrize(metafunc: pytest.Metafunc, fixture: str, cases: list[Case]) -> None:
    """Each case, in each of its formats if the test has the argument `packed`."""
    skips = {case: pytest.mark.skip(case.reason) if case.reason else () for case in cases}
    if "packed" not in metafunc.fixturenames:
        values = [pytest.param(case, marks=skips[case], id=str(case)) for case in cases]
        metafunc.parametrize(fixture, values)
        return
    values = [
        pytest.param(
            case, packed, marks=skips[case], id=f"{case}-{'packed' if packed else 'float'}"
        )
        for case in cases
        for packed in case.formats
    ]
    metafunc.parametrize((fixture, "packed"), values)
