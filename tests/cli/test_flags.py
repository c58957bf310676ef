"""Values of flags: what each text means, and what is reported where it means nothing."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from mlx_mmfree.cli.parts.flags import (
    boolean,
    gigabytes,
    integer,
    json_object,
    non_negative,
    number_list,
    positive,
    seed,
    size_bytes,
)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (positive, "1", 1),
        (positive, "2147483647", 2**31 - 1),
        (non_negative, "0", 0),
        (integer, "-1", -1),
        (seed, "9223372036854775807", 2**63 - 1),
        (gigabytes, "1.5", 1_500_000_000),
        (gigabytes, "0", 0),
        (size_bytes, "500", 500),
        (size_bytes, "500MB", 500_000_000),
        (size_bytes, "2 gb", 2_000_000_000),
        (size_bytes, "1.5M", 1_500_000),
        (size_bytes, "3G", 3_000_000_000),
        (boolean, "T", True),
        (boolean, "false", False),
        (json_object, '{"a": [1]}', {"a": [1]}),
        (number_list, "0", {0}),
        (number_list, "7, 0-2,2", {0, 1, 2, 7}),
    ],
)
def test_values(kind: Callable[[str], Any], text: str, value: object) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (positive, "0", "a whole number from 1 to 2147483647 but got '0'"),
        (positive, "2147483648", "a whole number from 1 to"),
        (non_negative, "-1", "a whole number from 0 to"),
        (integer, "1.0", "a whole number from -2147483647 to"),
        (seed, "9223372036854775808", "a whole number from 0 to"),
        (gigabytes, "-1", "a size in GB from 0 to"),
        (gigabytes, "nan", "a size in GB from 0 to"),
        (size_bytes, "2KB", "a size such as 500MB or 2GB, of at most 9000000000GB, but got '2KB'"),
        (size_bytes, "9000000001GB", "a size such as"),
        (size_bytes, "9" * 400, "a size such as"),
        (size_bytes, "MB", "a size such as"),
        (boolean, "yes", "T or F but got 'yes'"),
        (number_list, "3-1", "numbers and ranges such as 0,4-6 but got '3-1'"),
        (number_list, "", "numbers and ranges such as"),
        (number_list, "-1", "numbers and ranges such as"),
        (json_object, "[]", "a JSON object but got"),
        (json_object, "{", "a JSON object but '{'"),
    ],
)
def test_mistakes(kind: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        kind(text)
    assert str(caught.value).startswith(f"must be {message}")
