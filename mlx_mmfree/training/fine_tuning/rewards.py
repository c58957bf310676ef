"""Rewards of answers: by functions of a user's file, or by comparison with the answer in the data."""

import json
import math
import re
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TrainingError
from ...files.reading import expanded, parse_json
from ...platform.confinement.frames import MOST_BYTES, receive, send
from ..corpus.rows import RowError, kind_of

_MINUS = "\N{MINUS SIGN}"
# LaTeX writes {,} and \, between groups
_MARK = r"[, \N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}]|\{,\}|\\,"
_GROUPED = rf"(?<!\d)(?<!\d,)\d{{1,3}}(?P<mark>{_MARK})\d{{3}}(?:(?P=mark)\d{{3}})*(?!\d)"
_NUMBER = re.compile(
    # after a number, a dash is no sign: 10-12
    rf"(?:(?<![\w%)\]}}])[-+{_MINUS}])?"
    rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?"
)
_MOST_TEXT_BYTES = 1_000_000
_END_OF_REASONING = "</think>"


def exact_match(text: str, answer: Any) -> bool:
    """Returns whether a text is the answer without the spaces around both, or has its value in JSON."""
    if text.strip() == str(answer).strip():
        return True
    try:
        return not isinstance(answer, str) and _same(_parsed(text.strip()), answer)
    except ValueError:
        return False


def number(text: str, answer: Any) -> bool:
    """Returns whether the last number of a text is the answer's.

    A comma or a space, LaTeX's `{,}` and `\\,` too, separates groups of exactly three digits: `12 000`
    is 12000, but the last number of `3,3` is 3.
    """
    found, wanted = _last_number(text), _last_number(str(answer))
    return found is not None and wanted is not None and math.isclose(found, wanted, rel_tol=1e-6)


def _last_number(text: str) -> float | None:
    found = [match.group() for match in _NUMBER.finditer(text)]
    return float(re.sub(_MARK, "", found[-1]).replace(_MINUS, "-")) if found else None


def json_schema(text: str, answer: Any) -> bool:
    """Returns whether a text is JSON that follows the schema in the answer."""
    try:
        value = _parsed(text.strip())
    except ValueError:
        return False
    return _follows(value, _schema_of(answer))


def _schema_of(answer: Any) -> Any:
    return _parsed(answer) if isinstance(answer, str) else answer


def _parsed(text: str) -> Any:
    return parse_json(text.encode("utf-8", "replace"), max_bytes=_MOST_TEXT_BYTES)


COMPARISONS: dict[str, Callable[[str, Any], bool]] = {
    "exact_match": exact_match,
    "number": number,
    "json_schema": json_schema,
}
"""The functions that compare an answer of the model with the data's; the reward is 1 or 0."""

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def _is_of_type(value: Any, name: str) -> bool:
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _same(value: Any, other: Any) -> bool:
    """Returns whether two values are equal in JSON, where 1 is 1.0 but not true."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


_KEYWORDS: dict[str, tuple[type, ...]] = {
    "type": (str, list),
    "enum": (list,),
    "const": (object,),
    "anyOf": (list,),
    "properties": (dict,),
    "required": (list,),
    "additionalProperties": (dict, bool),
    "items": (dict, bool),
    **dict.fromkeys(("minimum", "maximum"), (int, float)),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), (int, float)),
}
"""The keywords that are compared, with the types of their values."""

_WORDS = ("title", "description", "default", "examples", "$schema", "$id", "$comment")


def check_schema(schema: Any) -> None:
    """Refuses a schema with keywords that are not compared, and what is no schema.

    Raises:
        RowError: It is refused.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RowError(f"the schema must be an object but is {kind_of(schema)}.")
    for name, value in schema.items():
        if name in _WORDS:
            continue
        if name not in _KEYWORDS:
            known = ", ".join(_KEYWORDS)
            raise RowError(f"the schema has {name!r:.60}. Known are {known}.")
        if not isinstance(value, _KEYWORDS[name]):
            raise RowError(f"'{name}' of the schema must not be {kind_of(value)}.")
    for kind in _listed(schema.get("type", [])):
        if not isinstance(kind, str) or kind not in _TYPES:
            raise RowError(f"the schema has the type {kind!r:.60}. Known are {', '.join(_TYPES)}.")
    parts = [*schema.get("properties", {}).values(), *schema.get("anyOf", [])]
    parts += [schema[name] for name in ("items", "additionalProperties") if name in schema]
    for part in parts:
        check_schema(part)


def _listed(kinds: Any) -> list[Any]:
    return kinds if isinstance(kinds, list) else [kinds]


def _follows(value: Any, schema: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    kinds = _listed(schema.get("type", list(_TYPES)))
    values, formats = schema.get("enum"), schema.get("anyOf")
    return (
        any(_is_of_type(value, kind) for kind in kinds)
        and ("const" not in schema or _same(value, schema["const"]))
        and (values is None or any(_same(value, each) for each in values))
        and (formats is None or any(_follows(value, each) for each in formats))
        and _is_bounded(value, schema)
        and _has_parts(value, schema)
    )


def _is_bounded(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, (str, list)):
        suffix, size = "Length" if isinstance(value, str) else "Items", len(value)
    elif _is_of_type(value, "number"):
        suffix, size = "imum", value
    else:
        return True
    least, most = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    return (least is None or size >= least) and (most is None or size <= most)


def _has_parts(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, list):
        return all(_follows(each, schema.get("items", True)) for each in value)
    if not isinstance(value, dict):
        return True
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(name in value for name in schema.get("required", ())) and all(
        _follows(each, known.get(name, others)) for name, each in value.items()
    )


class RewardFile:
    """The functions of a user's Python file, which run in a process of their own.

    A function takes `completions`, and perhaps `prompts`, `completion_ids` and columns of the data by
    their names, each a list with a value for each answer, and returns a list of numbers. It may also
    take `trainer_state`, and be asynchronous. TRL's functions are such functions.

    Args:
        file: The file.
        timeout_s: The seconds that it may take to run the file, or a function.

    Attributes:
        names: The names of its functions, imported ones too, that take `completions` and do not begin
            with `_`.

    Raises:
        TrainingError: There is no such file, or it fails, lasts too long or has no such function.
    """

    def __init__(self, file: str | Path, timeout_s: float = 60.0):
        path = expanded(file).resolve()
        self._file, self._timeout_s = path, timeout_s
        if not path.is_file():
            raise TrainingError(
                "[grpo] 'reward_functions_file' must be a Python file with functions that give rewards "
                f"but there is no file '{file}'."
            )
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(timeout_s)
        command = [sys.executable, "-m", "mlx_mmfree.training.fine_tuning.reward_server", str(path)]
        with theirs:
            process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._finish = weakref.finalize(self, _end, process, self._connection)
        self.names: list[str] = self._received("the file")
        if not self.names:
            raise TrainingError(
                f"[grpo] '{path}' must have a function with the parameter 'completions' but has none."
            )

    def __call__(self, name: str, values: Mapping[str, Any]) -> list[float | None]:
        """The rewards that a function gives to some answers; `None` where it does not apply.

        Args:
            name: One of `names`.
            values: The answers as `completions`, and what else functions may take.

        Raises:
            TrainingError: The function fails or lasts too long.
        """
        request = json.dumps({"function": name, "values": values}).encode()
        try:
            send(self._connection, request)
        except OSError as error:
            raise self._ended(name) from error
        rewards: list[float | None] = self._received(f"the function '{name}'")
        return rewards

    def _received(self, what: str) -> Any:
        try:
            answer = json.loads(receive(self._connection, MOST_BYTES))
        except TimeoutError as error:
            self._finish()
            raise TrainingError(
                f"[grpo] {what} of '{self._file}' must be done in {self._timeout_s:g} seconds but runs "
                "on. Look for a loop that does not end, or raise 'reward_timeout_s'."
            ) from error
        except (EOFError, OSError) as error:
            raise self._ended(what) from error
        if "failure" in answer:
            raise TrainingError(f"[grpo] {what} of '{self._file}' {answer['failure']}.")
        return answer["answer"]

    def _ended(self, what: str) -> TrainingError:
        self._finish()
        return TrainingError(f"[grpo] {what} of '{self._file}' has ended the process that runs it.")


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


class Rewards:
    """Gives each answer the weighted sum of what functions say of it.

    Args:
        file: A Python file with functions; `None`: answers are compared with those in the data.
        names: Those to use. Default: all of the file, or `exact_match`.
        weights: The weights of the functions; `None`: 1.
        answer: The column of the answers that `COMPARISONS` compare with.
        timeout_s: As for `RewardFile`.
        steps: Number of optimizer steps of the run.

    Attributes:
        step: The optimizer steps that are done, for functions that take `trainer_state`.

    Raises:
        TrainingError: A function is unknown, or there are as many weights as functions not.
    """

    def __init__(
        self,
        file: str | None = None,
        names: Sequence[str] | None = None,
        weights: Sequence[float] | None = None,
        *,
        answer: str = "answer",
        timeout_s: float = 60.0,
        steps: int,
    ):
        self.step, self._steps = 0, steps
        self._has_warned = False
        self._file = None if file is None else RewardFile(file, timeout_s)
        own = [] if self._file is None else self._file.names
        self.names = list(names or own or ["exact_match"])
        self._answer = answer
        if unknown := [name for name in self.names if name not in (*own, *COMPARISONS)]:
            raise TrainingError(
                f"[grpo] 'reward_functions' must be some of {', '.join([*own, *COMPARISONS])} but got "
                f"{unknown[0]!r:.60}."
            )
        self._weights = [1.0] * len(self.names) if weights is None else list(weights)
        if len(self._weights) != len(self.names):
            raise TrainingError(
                f"[grpo] 'reward_weights' must be one for each of {', '.join(self.names)} but are "
                f"{len(self._weights)}."
            )

    def check(self, columns: Mapping[str, Any]) -> None:
        """Refuses a problem without the answer that a comparison needs.

        Raises:
            RowError: It has none, or a schema that is not one.
        """
        used = [name for name in self.names if self._is_comparison(name)]
        if used and columns.get(self._answer) is None:
            raise RowError(
                f"it must have '{self._answer}' for the reward '{used[0]}'. Name its key as "
                "'answer_feature', or give functions of your own as 'reward_functions_file'."
            )
        if "json_schema" in used:
            try:
                check_schema(_schema_of(columns[self._answer]))
            except ValueError as error:
                raise RowError(f"the schema {error}.") from error

    def _is_comparison(self, name: str) -> bool:
        return self._file is None or name not in self._file.names

    def __call__(
        self,
        prompts: Sequence[Any],
        texts: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        tokens: Sequence[Sequence[int]] = (),
    ) -> np.ndarray:
        """The rewards of some answers, float64 `(n,)`. One is NaN if no function applies.

        A function that returns `None` or NaN for an answer does not apply to it, and is left out of the
        answer's sum.

        Args:
            prompts: What each answers: a text or a list of messages.
            texts: The answers.
            columns: What else the data has of each.
            tokens: The token ids of the answers, for functions that take `completion_ids`.

        Raises:
            TrainingError: A function fails, lasts too long, or returns no number for an answer.
        """
        total, applies = np.zeros(len(texts)), np.zeros(len(texts), bool)
        of_run = {
            "completion_ids": [list(ids) for ids in tokens],
            "trainer_state": {"global_step": self.step, "max_steps": self._steps},
        }
        for name, weight in zip(self.names, self._weights, strict=True):
            given: Sequence[float | None]
            if self._is_comparison(name):
                given = self._compared(name, texts, columns)
            else:
                assert self._file is not None
                given = self._file(name, _values(prompts, texts, columns) | of_run)
            rewards = np.array(given, np.float64)
            if len(rewards) != len(texts) or np.isinf(rewards).any():
                raise TrainingError(
                    f"[grpo] '{name}' must return a finite number, or None where it does not apply, for "
                    f"each of {len(texts)} completions but returned {given!r:.120}."
                )
            applies |= ~np.isnan(rewards)
            total += weight * np.nan_to_num(rewards)
        self._warn(len(texts) - int(applies.sum()), len(texts))
        return np.where(applies, total, np.nan)

    def _warn(self, missing: int, count: int) -> None:
        """Says once that no function applies to some answers."""
        if missing and not self._has_warned:
            self._has_warned = True
            print(
                f"note: none of {', '.join(self.names)} gave a reward to {missing} of {count} answers, "
                "which count 0. 'without_reward' in the log is their share at each step.",
                file=sys.stderr,
            )

    def _compared(
        self, name: str, texts: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        # reasoning is no part of the answer
        answers = [text.rpartition(_END_OF_REASONING)[2] for text in texts]
        compare = COMPARISONS[name]
        pairs = zip(answers, columns, strict=True)
        return [float(compare(text, each[self._answer])) for text, each in pairs]


def _values(
    prompts: Sequence[Any], texts: Sequence[str], columns: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """The arguments that functions may take, by name: as in TRL, answers to messages are messages."""
    names = {name for each in columns for name in each}
    values = {name: [each.get(name) for each in columns] for name in sorted(names)}
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return {**values, "prompts": list(prompts), "completions": completions}
