"""Every golden file of a folder has a test."""

from pathlib import Path

from tests.goldens.mixers.files import compared_names, name_of


def test_every_file_is_compared_with(mixer_files: list[Path]) -> None:
    names = {name_of(file) for file in mixer_files}
    assert names - compared_names() == set()
