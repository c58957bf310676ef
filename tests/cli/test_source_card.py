"""A model card names the command that wrote the model."""

from pathlib import Path

import pytest

from mlx_mmfree.cli.parts.source_card import model_card


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("/home/me/secret/model", "model"),
        ("--model=/home/me/secret/model", "--model=model"),
        ("--model=~/secret/model", "--model=model"),
        ("--model=me/model", "--model=me/model"),
        ("--embed-bits=8", "--embed-bits=8"),
        ("me/model", "me/model"),
        ("--overwrite", "--overwrite"),
    ],
)
def test_a_public_card_names_no_local_folder(argument: str, shown: str, tmp_path: Path) -> None:
    card = model_card("convert", [argument], str(tmp_path), None, tmp_path)
    assert card.command == f"mmfree convert {shown}"
