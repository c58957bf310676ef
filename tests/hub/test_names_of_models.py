"""Names of models that are nearly the names of known repositories are answered with these."""

import pytest

from mlx_mmfree.errors import CheckpointError, DownloadError
from mlx_mmfree.hub import load
from mlx_mmfree.hub.remote.download import meant


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("Microsoft/bitnet-b1.58-2b-4t", "microsoft/bitnet-b1.58-2B-4T"),
        ("MMfreeLM-370M", "ridger/MMfreeLM-370M"),
        ("mmfreelm-370m", "ridger/MMfreeLM-370M"),
        ("ridger/MMfreeLM-370", "ridger/MMfreeLM-370M"),
        ("tiiuae/Falcon3-7B-Instruct-1.58bits", "tiiuae/Falcon3-7B-Instruct-1.58bit"),
    ],
)
def test_a_known_repository_is_suggested(given: str, wanted: str) -> None:
    assert meant(given) == f"Did you mean '{wanted}'? "


@pytest.mark.parametrize("given", ["me/own-model", "something"])
def test_other_names_are_reported_to_be_checked(given: str) -> None:
    assert meant(given) == "Check the spelling. "


def test_the_spelling_of_a_known_name_is_right() -> None:
    assert meant("ridger/MMfreeLM-370M") == ""


def test_messages_suggest_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"neither\. Did you mean 'ridger/MMfreeLM-370M'\?"):
        load("MMfreeLM-370M")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match=r"download\. Did you mean 'ridger/MMfreeLM-370M'\?"):
        load("ridger/mmfreelm-370m")
