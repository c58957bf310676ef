"""Whole numbers of settings: each is taken or refused in one line."""

from dataclasses import fields
from typing import Any, get_args

import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.distil.settings import DistilSettings
from mlx_mmfree.training.run_settings import RunSettings
from mlx_mmfree.training.settings import Settings

_NUMBERS = (-1, 2**31, 2**63, 10**30, 1e30)
_NEEDED: dict[type[RunSettings], dict[str, Any]] = {
    Settings: {"output": "run", "init_from": "m", "stages": [{"until": 1, "weights": {"a": 1}}]},
    DistilSettings: {"model": "m", "output": "s", "to": "gla", "data": "a"},
}
_WHOLE = [
    (kind, each.name)
    for kind in _NEEDED
    for each in fields(kind)
    if int in (each.type, *get_args(each.type)) and "words" in each.metadata
]


def test_there_are_some() -> None:
    assert len(_WHOLE) > 20


@pytest.mark.parametrize("value", _NUMBERS, ids=str)
@pytest.mark.parametrize(("kind", "name"), _WHOLE)
def test_each_is_taken_or_refused(kind: type[RunSettings], name: str, value: float) -> None:
    needed = _NEEDED[kind]
    try:
        made = kind.made(needed | {name: value}, "the file")
    except TrainingError as error:
        assert "\n" not in str(error) and name in str(error)
    else:
        most = 2**63 if name == "seed" else 2**31
        # a reader may make a list of numbers of layers
        for number in [getattr(made, name)] if isinstance(getattr(made, name), int) else ():
            assert abs(number) < most
