"""JSON from strangers is refused where it would take too much."""

import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.files.reading import MAX_DEPTH, parse_json, read_json_object, write_json


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (b'{"a": [1, 2.5, null, true, "\\ud83d\\ude42"]}', {"a": [1, 2.5, None, True, "🙂"]}),
        (b"1000000000000000019884624838656", 1000000000000000019884624838656),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, None),
        ('"Größe"'.encode(), "Größe"),
        ('\ufeff"Größe"'.encode(), "Größe"),
    ],
)
def test_ordinary_values(text: bytes, want: Any) -> None:
    value = parse_json(text)
    assert want is None or value == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "must be JSON"),
        (b"{'a': 1}", "must be JSON"),
        (b'"\xff"', "must be UTF-8 but is not at byte 1"),
        ("[1]".encode("utf-16"), "must be UTF-8 but is UTF-16"),
        (b"1e400", "finite numbers but got 1e400"),
        (b"[NaN]", "finite numbers but got NaN"),
        (b"-Infinity", "finite numbers but got -Infinity"),
        (b"9" * 41, "at most 40 digits"),
        (b"9" * 5000, "at most 40 digits"),
        (b"[" * 65 + b"]" * 65, "at most 64 deep"),
        (b'{"a":' * 100_000, "at most 64 deep"),
        (b"[" * 100_000, "at most 64 deep"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'[{"a": {"\\udfff": 1}}]', "half of a surrogate pair"),
        (b" " * 16_000_001, "at most 16,000,000 bytes"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_refusals(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_repeated_keys() -> None:
    with pytest.raises(ValueError, match="repeats 'a'"):
        parse_json(b'{"b": {"a": 1, "a": 2}}', unique_keys=True)


def test_limits_of_the_caller() -> None:
    assert parse_json(b"[" + b"0," * 1_000_000 + b"0]", max_values=1_000_001)[-1] == 0
    for limit in ({"max_bytes": 6}, {"max_values": 2}):
        with pytest.raises(ValueError, match="at most"):
            parse_json(b"[1,2,3]", **limit)


def test_infinity_where_it_is_meant() -> None:
    assert parse_json(b"[Infinity, 1e400]", finite=False) == [float("inf")] * 2


def test_what_json_lacks_is_tagged_and_read_back(tmp_path: Path) -> None:
    value = {"a": [1, (math.inf, 2.5)], "b": {"c": -math.inf}, "d": True, "e": "Infinity"}
    write_json(tmp_path / "x.json", value | {"f": math.nan})
    text = (tmp_path / "x.json").read_text()
    assert "NaN" in parse_json(text.encode())["f"].values()
    read = read_json_object(tmp_path / "x.json")
    assert math.isnan(read.pop("f"))
    assert read == {**value, "a": [1, [math.inf, 2.5]]}


def test_other_objects_with_the_tag_stay(tmp_path: Path) -> None:
    value = {"a": {"__float__": "1.5"}, "b": {"__float__": "NaN", "c": 1}, "d": {"__float__": [1]}}
    write_json(tmp_path / "x.json", value)
    assert read_json_object(tmp_path / "x.json") == value


def test_many_values_are_refused_before_they_take_memory() -> None:
    text = b"[" + b"[]," * 1_500_000 + b"[]]"
    tracemalloc.start()
    with pytest.raises(ValueError, match="at most 1,000,000 values"):
        parse_json(text)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
