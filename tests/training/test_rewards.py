"""Rewards: what functions of a file may do and may not, and what comparisons count as right."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.corpus.rows import RowError
from mlx_mmfree.training.fine_tuning.rewards import COMPARISONS, Rewards, check_schema

FILE = """
import numpy as np

def length(completions):
    print("what a function prints is no reward")
    return np.array([len(text) for text in completions])

def agrees(prompts, completions, answer, **columns):
    return [text == wanted for text, wanted in zip(completions, answer)]

def _helper(completions):
    raise AssertionError("it is not a reward")

def other(x):
    raise AssertionError("it is not a reward")
"""


def _file(folder: Path, text: str) -> str:
    (folder / "rewards.py").write_text(text)
    return str(folder / "rewards.py")


def _given(rewards: Rewards, *texts: str, prompt: Any = "Say it.") -> list[float]:
    columns = [{"answer": "yes"} for _ in texts]
    given: list[float] = rewards([prompt] * len(texts), texts, columns).tolist()
    return given


@pytest.mark.exhaustive
def test_functions_of_a_file_are_summed(tmp_path: Path) -> None:
    file = _file(tmp_path, FILE)
    rewards = Rewards(file, steps=4)
    assert rewards.names == ["length", "agrees"]
    assert _given(rewards, "yes", "no") == [4, 2]
    weighted = Rewards(file, ["agrees", "length", "exact_match"], [10, 0.5, 100], steps=4)
    assert _given(weighted, "yes", "no ") == [111.5, 1.5]


def test_a_function_that_does_not_apply_is_left_out_of_the_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "def short(completions):\n    return [None if len(c) > 3 else len(c) for c in completions]\n"
        "def some(completions):\n    return [10 if c == 'yes' else float('nan') for c in completions]"
    )
    given = Rewards(_file(tmp_path, text), weights=[2, 1], steps=4)
    assert np.array_equal(_given(given, "yes", "no", "perhaps"), [16, 4, np.nan], equal_nan=True)
    _given(given, "perhaps")
    assert capsys.readouterr().err.count("gave a reward to 1 of 3 answers") == 1


def test_functions_are_used_as_trl_uses_them(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(
        "def imported(completions, **columns):\n    return [1] * len(completions)"
    )
    text = (
        "import asyncio\nimport functools\nfrom my_module import imported\n"
        "async def waits(completions, completion_ids, **columns):\n"
        "    await asyncio.sleep(0)\n    return [sum(ids) for ids in completion_ids]\n"
        "def at(completions, trainer_state):\n"
        "    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)\n"
        "def _weighted(factor, completions):\n    return [factor] * len(completions)\n"
        "twice = functools.partial(_weighted, 0.5)\nagain = imported\n"
    )
    rewards = Rewards(_file(tmp_path, text), steps=4)
    assert rewards.names == ["imported", "waits", "at", "twice"]
    rewards.step = 1
    columns = [{"answer": "yes"}] * 2
    assert rewards(["Say it."] * 2, ["a", "b"], columns, [[3, 4], [5]]).tolist() == [8.75, 6.75]


def test_answers_to_messages_are_messages(tmp_path: Path) -> None:
    text = "def f(completions, prompts):\n    return [len(c[0]['content']) for c in completions]"
    messages = [{"role": "user", "content": "Say it."}]
    assert _given(Rewards(_file(tmp_path, text), steps=4), "yes", prompt=messages) == [3]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(completions):\n    return 1 / 0", r"'f'.* raised ZeroDivisionError in line 2"),
        ("def f(completions, level):\n    return []", r"'f'.* raised TypeError: .*'level'"),
        ("def f(completions):\n    return [1.0]", "for each of 2 completions"),
        ("def f(completions):\n    return [float('inf')] * 2", "a finite number, or None where"),
        ("def f(completions):\n    return 'ab'", "raised ValueError in line|raised ValueError"),
        ("def f(completions):\n    while True: pass", "done in 1 seconds but runs on"),
        ("import os\ndef f(completions):\n    os._exit(3)", "has ended the process"),
        ("def f(completions):\n    raise SystemExit", "raised SystemExit"),
        ("def f(:", "the file of .* raised SyntaxError"),
        ("import nothing_of_this_name", "raised ModuleNotFoundError in line 1"),
        ("while True: pass", "the file of .* must be done in 1 seconds"),
        ("def f(x): pass", "with the parameter 'completions' but has none"),
    ],
)
def test_what_goes_wrong_in_a_file_is_reported(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TrainingError, match=words) as caught:
        limit = 1.0 if "while" in text else 30.0
        _given(Rewards(_file(tmp_path, text), timeout_s=limit, steps=4), "yes", "no")
    assert "\n" not in str(caught.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"file": "none.py"}, "there is no file 'none.py'"),
        ({"names": ["best"]}, "must be some of exact_match, number, json_schema but got 'best'"),
        ({"weights": [1.0, 2.0]}, "one for each of exact_match but are 2"),
    ],
)
def test_what_is_not_there_is_reported(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        Rewards(**options, steps=4)


@pytest.mark.parametrize(
    ("name", "text", "answer", "is_right"),
    [
        ("exact_match", " Paris\n", "Paris", True),
        ("exact_match", "Paris.", "Paris", False),
        ("exact_match", "7", 7, True),
        ("number", "So it is 1,234.50 in all.", "1234.5", True),
        ("number", "First 3, then -2", -2, True),
        ("number", "First -2, then 3", -2, False),
        ("number", "none", 3, False),
        ("number", "3,3,3", 3, True),
        ("number", "1,2,345", 345, True),
        ("number", "It is 10-12.", 12, True),
        ("number", "(3)-5", 5, True),
        ("number", "x = -5", -5, True),
        ("number", "\N{MINUS SIGN}5", -5, True),
        ("number", "5", "\N{MINUS SIGN}5", False),
        ("number", "12 000 km", 12000, True),
        ("number", "12\N{NO-BREAK SPACE}000", 12000, True),
        ("number", "12\N{THIN SPACE}345\N{THIN SPACE}678.5", 12345678.5, True),
        ("number", "12\N{NARROW NO-BREAK SPACE}000", "12,000", True),
        ("number", r"\boxed{12{,}000}", 12000, True),
        ("number", r"$12\,345\,678$", 12345678, True),
        ("number", "12 0000", 120000, False),
        ("number", "In 2020 300 people", 300, True),
        ("number", "1,234 567", 567, True),
        ("number", "12\n000", 12000, False),
        ("exact_match", "1", 1.0, True),
        ("exact_match", "1.0", 1, True),
        ("exact_match", "1.0", "1", False),
        ("exact_match", "true", 1, False),
        ("exact_match", "1", True, False),
        ("exact_match", "true", True, True),
        ("exact_match", "[1, 2.0]", [1.0, 2], True),
        ("json_schema", "1", {"enum": [1.0, 2.0]}, True),
        ("json_schema", '{"a": [1.0]}', {"const": {"a": [1]}}, True),
        ("json_schema", '{"a": [1.0]}', {"const": {"a": [True]}}, False),
        ("json_schema", "[1, 2]", {"minItems": 2.0}, True),
        ("json_schema", '{"a": 1}', {"type": "object", "required": ["a"]}, True),
        ("json_schema", '{"a": 1}', '{"required": ["b"]}', False),
        ("json_schema", "[1, 2.0]", {"items": {"type": "integer"}, "minItems": 2}, True),
        ("json_schema", "[1, true]", {"items": {"type": "integer"}}, False),
        ("json_schema", '{"a": 1, "b": 2}', {"properties": {"a": {}}}, True),
        (
            "json_schema",
            '{"a": 1, "b": 2}',
            {"properties": {"a": {}}, "additionalProperties": False},
            False,
        ),
        ("json_schema", '"no"', {"enum": ["yes", "no"]}, True),
        ("json_schema", '"maybe"', {"enum": ["yes", "no"]}, False),
        ("json_schema", "true", {"const": 1}, False),
        ("json_schema", "5", {"anyOf": [{"type": "string"}, {"minimum": 5}]}, True),
        ("json_schema", "4", {"anyOf": [{"type": "string"}, {"minimum": 5}]}, False),
        ("json_schema", '"abc"', {"type": ["string", "null"], "maxLength": 2}, False),
        ("json_schema", "not JSON", True, False),
    ],
)
def test_what_counts_as_right(name: str, text: str, answer: Any, is_right: bool) -> None:
    assert COMPARISONS[name](text, answer) == is_right


def test_reasoning_is_no_part_of_an_answer() -> None:
    assert _given(Rewards(steps=4), "<think>no</think>yes", "yes<think>") == [1, 0]


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "(a+)+b"},
        {"type": "text"},
        {"items": {"type": [[]]}},
        {"properties": []},
        {"minItems": "2"},
        {"anyOf": [7]},
        {"additionalProperties": {"$ref": "#"}},
        [],
    ],
)
def test_schemas_that_are_not_compared_are_refused(schema: Any) -> None:
    with pytest.raises(RowError, match="schema"):
        check_schema(schema)
    with pytest.raises(RowError, match="schema"):
        Rewards(names=["json_schema"], steps=4).check({"answer": json.dumps(schema)})


def test_a_comparison_needs_an_answer() -> None:
    with pytest.raises(RowError, match="must have 'answer' for the reward 'exact_match'"):
        Rewards(steps=4).check({"prompt": "What?"})
    Rewards(answer="solution", steps=4).check({"solution": 0})
