"""YAML from strangers gives plain values, or one clear line at once."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.files.yaml_text import MAX_BYTES, parse_yaml
from mlx_mmfree.hub.publish.model_card import read_source_card
from mlx_mmfree.training.run_settings import read_mapping

LEVELS = 40
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, LEVELS)
)
ALIASES = "a0: &a0 [x, y]\n" + "".join(
    f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, LEVELS)
)
HOSTILE = {
    "merges": ("\n".join(MERGES.splitlines()[:9]), r"merge keys \('<<'\) are not read.* line 3"),
    "more merges": (MERGES, "there must be at most 16 aliases but are more"),
    "one merge": ("a: &a {b: 1}\nc: {!!merge x: *a}", "merge keys"),
    "aliases": (ALIASES, "there must be at most 16 aliases but are more"),
    "a value that holds itself": ("&a [" + "*a, " * 17 + "]", "at most 16 aliases"),
    "depth": ("a: " + "[" * 99, "values must be nested at most 32 deep but go deeper"),
    "depth of blocks": ("- " * 9999 + "a", "nested at most 32 deep"),
    "a repeated key": ("a: 1\nb: 2\na: 3", "each key must stand there once but 'a' is repeated"),
    "length": ("a: " + "b" * MAX_BYTES, "it must have at most 65536 bytes but has more"),
    "digits": ("a: " + "9" * 5000, "digits"),
    "an object": ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "a wrong tag": ("a: !!int [1]", "expected a scalar node"),
    "an odd tag": ("a: !!float x", "could not convert"),
    "an odd truth": ("a: !!bool x", "a value does not fit its tag"),
    "an odd key": ("? [a]\n: b", "unhashable key"),
    "two documents": ("a: 1\n...\nb: 2", "expected '<document start>'"),
    "a faulty text": ("a: [", "expected the node content"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text(text: str, message: str, tmp_path: Path) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=message):
        parse_yaml(text.encode())
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()
    file = tmp_path / "train.yaml"
    file.write_text(text)
    with pytest.raises(
        TrainingError, match=r"train\.yaml' must be a readable YAML file: "
    ) as caught:
        read_mapping(file, "train")
    assert len(str(caught.value)) < 1000
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{text}\n---\nbody")
    assert read_source_card(tmp_path).metadata == {}


def test_words_of_cards(tmp_path: Path) -> None:
    """`no` is Norwegian there, and other programs read it so; settings of a run mean false."""
    text = "language: [no, on, off, yes, y]\ntags:\n- no\nis: true\nnot: False\n"
    words = {"language": ["no", "on", "off", "yes", "y"], "tags": ["no"], "is": True, "not": False}
    assert parse_yaml(text.encode(), has_words=True) == words
    assert parse_yaml(b"a: no") == {"a": False}
    (tmp_path / "README.md").write_text(f"---\n{text}---\n")
    assert read_source_card(tmp_path).metadata == words


def test_text_that_is_not_utf8() -> None:
    with pytest.raises(ValueError, match="it must be UTF-8 but is not at byte 3"):
        parse_yaml(b"a: \xff")
    with pytest.raises(ValueError, match="it must be UTF-8 but is UTF-16"):
        parse_yaml("a: 1".encode("utf-16"))
    assert parse_yaml("\ufeffa: 1".encode()) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 2024-01-02", {"a": "2024-01-02"}),
        ("a: 2024-99-99 10:11:12", {"a": "2024-99-99 10:11:12"}),
        ("a: !!timestamp 2024-01-02", {"a": "2024-01-02"}),
        ("a: [1, 2.5, yes, null, '3', '1e-5']", {"a": [1, 2.5, True, None, "3", "1e-5"]}),
        ("a: [1e-5, .5e3, 1e, e5, 1e5x, 1-e5]", {"a": [1e-5, 500.0, "1e", "e5", "1e5x", "1-e5"]}),
        ("a: &x [1]\nb: *x\nc: {d: *x}", {"a": [1], "b": [1], "c": {"d": [1]}}),
        ("\ufeffa: \u00e9", {"a": "\u00e9"}),
        ("'<<': 1", {"<<": 1}),
        ("1: a\n'1': b", {1: "a", "1": "b"}),
    ],
)
def test_plain_values(text: str, value: Any) -> None:
    assert parse_yaml(text.encode()) == value


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "text",
    [
        *("1e-5", "1E5", "+1e+5", "-3e2", "1.5e3", "1.5e+3", "1.e2", ".5e-3", "1_000e-2", "2e0"),
        *(
            "1",
            "-1",
            "1_000",
            "0x1F",
            "010",
            "1.",
            ".5",
            "1:30",
            ".inf",
            "-.inf",
            "1.5",
            "0.1e-400",
        ),
        *(
            "e5",
            "1e",
            "1e5.5",
            "1e-",
            "1e5 # five",
            "1 e5",
            "--1e5",
            "1ee5",
            "v1e5",
            "'1e5'",
        ),
    ],
)
def test_numbers_are_those_of_mlx_lm(text: str) -> None:
    from mlx_lm.lora import yaml_loader

    found, want = parse_yaml(f"a: {text}".encode()), yaml.load(f"a: {text}", yaml_loader)
    assert found == want and type(found["a"]) is type(want["a"])
