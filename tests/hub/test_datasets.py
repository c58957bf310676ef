"""Files of datasets of the Hub: which are listed, and which make a split."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_mmfree.errors import CheckpointError, DownloadError
from mlx_mmfree.hub.remote import datasets
from mlx_mmfree.hub.remote.datasets import DatasetFile, dataset_files, split_files

NAME, COMMIT = "owner/name", "0123"
Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The requests to a Hub whose dataset has a few files."""
    names = [
        "b.jsonl",
        ".hidden.jsonl",
        "a/train.jsonl",
        "train-1-of-2.jsonl",
        "train-0-of-2.jsonl",
    ]
    listed = [
        SimpleNamespace(commit_hash=COMMIT, filename=name, file_size=10 + number)
        for number, name in enumerate(names)
    ]
    requests: Asked = []

    def ask_hub(*arguments: Any, **options: Any) -> Any:
        requests.append((*arguments, options))
        return listed

    monkeypatch.setattr(datasets, "ask_hub", ask_hub)
    return requests


def test_all_but_hidden_files_are_listed_in_the_order_of_their_names(asked: Asked) -> None:
    assert dataset_files(NAME, "main", ["*.jsonl"]) == [
        DatasetFile(dataset=NAME, commit=COMMIT, name="a/train.jsonl", size_bytes=12),
        DatasetFile(dataset=NAME, commit=COMMIT, name="b.jsonl", size_bytes=10),
        DatasetFile(dataset=NAME, commit=COMMIT, name="train-0-of-2.jsonl", size_bytes=14),
        DatasetFile(dataset=NAME, commit=COMMIT, name="train-1-of-2.jsonl", size_bytes=13),
    ]
    options = {"dry_run": True, "repo_type": "dataset", "has_folders": True}
    assert asked == [(NAME, "main", ("*.jsonl",), options)]


def test_a_name_without_an_owner_is_refused(asked: Asked) -> None:
    with pytest.raises(CheckpointError, match="a Hub dataset 'owner/name' but got 'name'"):
        dataset_files("name")
    assert not asked


@pytest.mark.usefixtures("asked")
def test_files_of_a_split() -> None:
    found = split_files(f"{NAME}:a/train")
    assert [file.name for file in found] == ["a/train.jsonl"]
    with pytest.raises(DownloadError, match=r"must be one split but lies in \., a"):
        split_files(f"{NAME}:train")
    with pytest.raises(DownloadError, match=r"must name a split with files of \.jsonl, \.parquet"):
        split_files(f"{NAME}:test")
