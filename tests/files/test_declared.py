"""A field is declared once: its words, its default and its rules go on to subclasses."""

from dataclasses import dataclass, fields

import pytest

from mlx_mmfree.files.declared import Declared, declare


@dataclass(frozen=True)
class Boat(Declared):
    """A vessel that floats.

    Raises:
        ValueError: It is none.
    """

    length: int = declare("In metres.", 7, low=1)
    names: tuple[str, ...] = declare("What it is called.", factory=tuple)


@dataclass(frozen=True)
class Ship(Boat):
    """A vessel that floats far."""

    length: int = 90
    masts: int = declare("How many.", 3)


def test_words_are_documentation() -> None:
    listed = "Attributes:\n    length: In metres.\n    names: What it is called."
    assert (
        Boat.__doc__ == f"A vessel that floats.\n\n{listed}\n\nRaises:\n    ValueError: It is none."
    )
    assert Ship.__doc__ == f"A vessel that floats far.\n\n{listed}\n    masts: How many."


def test_a_subclass_gives_another_default_alone() -> None:
    assert (Boat().length, Ship().length, Ship(5).length) == (7, 90, 5)
    metadata = {each.name: each.metadata for each in fields(Ship)}
    assert metadata["length"] == {"words": "In metres.", "low": 1}
    assert Boat().names == ()


def test_a_field_without_a_default_must_be_given() -> None:
    @dataclass(frozen=True)
    class Raft(Declared):
        """A vessel that drifts."""

        logs: int = declare("Of pine.")

    assert Raft(4).logs == 4
    with pytest.raises(TypeError, match="logs"):
        Raft()
