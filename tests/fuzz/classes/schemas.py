"""JSON schemas of requests, in `response_format` and in tools: random ones, and those that explode."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_mmfree.platform.resident_memory import resident_memory
from tests.fuzz.base_model import link_base, make_base
from tests.fuzz.case import FuzzClass, Late
from tests.fuzz.classes.request_bodies import Refusal, client, judge
from tests.fuzz.hostile import ODD_VALUES, damage_json
from tests.hub.checkpoints import edit_json

_BODY, _PATH = "body", "/v1/chat/completions"
_GROWTH_BYTES = 300_000_000
# knows calls, and writes nothing of them, so that large tools leave space for an answer
_TEMPLATE = """{% if tools %}{{ '<tool_call>{"name": "", "arguments": {}}</tool_call>' }}{% endif %}
{{ messages[0].content }}"""
_PATTERNS = (
    *(
        "[a-z]+",
        ".*",
        "^a$",
        "(a|b)*c",
        "a{2,5}",
        r"\d{3}-\d{4}",
        r"^\S+@\S+$",
        "[^x]*x",
        "\u00e9+",
        "",
    ),
    *(
        "(a*)*b",
        "(",
        "a{9,1}",
        "(?=a)b",
        r"(a)\1",
        "^(?!a)",
        "[",
        r"\p{L}+",
        "(?i)abc",
        r"\bword\b",
    ),
)
_FORMATS = ("date-time", "date", "time", "email", "uuid", "uri", "ipv4", "ipv6", "hostname", "x")
_SIZES = (0, 1, 2, 3, 10, 100, 1000, 10**5, 10**9)
_NUMBERS = (0, 1, -1, 0.1, 1.5, -7, 99, 10**6, 10**15, 1e300, 1e-300, 2**70)


def _any(rng: random.Random, depth: int) -> Any:
    """A schema of random keywords, most of which go together."""
    if depth == 0 or rng.random() < 0.05:
        return rng.choice(
            ({"type": "string"}, {"type": "integer"}, {}, True, False, {"type": "null"})
        )
    kind = rng.choice(("object", "object", "array", "string", "number", "choice", "values", "odd"))
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        return _array(rng, depth)
    if kind == "string":
        return _some(
            rng,
            {"type": "string"},
            pattern=rng.choice(_PATTERNS),
            format=rng.choice(_FORMATS),
            minLength=rng.choice(_SIZES),
            maxLength=rng.choice(_SIZES),
        )
    if kind == "number":
        return _some(
            rng,
            {"type": rng.choice(("integer", "number"))},
            minimum=rng.choice(_NUMBERS),
            maximum=rng.choice(_NUMBERS),
            exclusiveMinimum=rng.choice(_NUMBERS),
            multipleOf=rng.choice(_NUMBERS),
        )
    if kind == "choice":
        name = rng.choice(("anyOf", "anyOf", "oneOf", "allOf"))
        return {name: [_any(rng, depth - 1) for _ in range(rng.randrange(1, 5))]}
    if kind == "values":
        values = [rng.choice(ODD_VALUES) for _ in range(rng.randrange(1, 6))]
        return {"const": values[0]} if rng.random() < 0.3 else {"enum": values}
    odd = rng.choice(
        ("$ref", "type", "items", "properties", "not", "if", "$defs", "x-guidance", "$id")
    )
    return {odd: rng.choice((*ODD_VALUES, "#", "#/$defs/a", "#/properties/a", "http://a/b"))}


def _some(rng: random.Random, first: dict[str, Any], **more: Any) -> dict[str, Any]:
    return first | {name: value for name, value in more.items() if rng.random() < 0.3}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = [rng.choice("abcdefg") * rng.randrange(1, 4) for _ in range(rng.randrange(5))]
    return _some(
        rng,
        {"type": "object", "properties": {name: _any(rng, depth - 1) for name in names}},
        required=[*names, *rng.sample("xyz", rng.choice((0, 0, 1)))],
        additionalProperties=_any(rng, depth - 1),
        patternProperties={rng.choice(_PATTERNS): _any(rng, depth - 1)},
        minProperties=rng.choice(_SIZES),
        maxProperties=rng.choice(_SIZES),
    )


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    return _some(
        rng,
        {"type": "array", "items": _any(rng, depth - 1)},
        prefixItems=[_any(rng, depth - 1) for _ in range(rng.randrange(4))],
        minItems=rng.choice(_SIZES),
        maxItems=rng.choice(_SIZES),
        uniqueItems=True,
    )


def _definitions(rng: random.Random) -> Any:
    """Definitions that refer to each other: deep, again and again, or in circles."""
    count = rng.choice((3, 30, 300, 1000, 3000, 10_000))
    link = rng.choice(
        (
            lambda to: {"type": "object", "properties": {"a": to}},
            lambda to: {"type": "object", "properties": {"a": to, "b": to}, "required": ["a"]},
            lambda to: {"anyOf": [{"type": "null"}, to]},
            lambda to: {"anyOf": [to, {"type": "array", "items": to}]},
            lambda to: {"allOf": [to, to]},
            lambda to: {"type": "array", "items": to, "minItems": 2},
            lambda to: {"allOf": [to, {"type": "string", "pattern": rng.choice("abcdef")}]},
            lambda to: to,
        )
    )
    step = rng.choice((1, 1, 1, 2))
    last = rng.choice(({"type": "string"}, {"$ref": "#/$defs/d0"}, {"$ref": "#"}, _any(rng, 2)))
    names = {n: {"$ref": f"#/$defs/d{min(n + step, count)}"} for n in range(count)}
    return {"$defs": {**{f"d{n}": link(to) for n, to in names.items()}, f"d{count}": last}} | {
        "$ref": "#/$defs/d0"
    }


def _combined_patterns(rng: random.Random) -> Any:
    """Patterns that must hold together, whose automaton multiplies."""
    letters = [chr(97 + n) for n in range(26)]
    format = rng.choice(
        (
            ".*{}.*",
            "^.*{}.{{3}}$",
            "[^{}]*",
            "(.*{}){{2,9}}",
            "^(..)*{}",
            "x{{0,99}}.*{}",
            ".*{}.{{9}}",
        )
    )
    parts = [
        {"type": "string", "pattern": format.format(letter)}
        for letter in rng.sample(letters, rng.choice((2, 3, 5, 8, 14, 20, 26)))
    ]
    if rng.random() < 0.3:
        parts.append({"type": "string", "minLength": rng.choice(_SIZES), "maxLength": 10**4})
    return {"allOf": parts}


def _pattern(rng: random.Random) -> Any:
    """One pattern that is large, repeated within repeats, or has many states."""
    many = rng.choice((10, 60, 400, 3000))
    word = rng.choice(("a", "[a-z]", "(a|b)", ".", "(ab|cd.*)", "\u4e00", r"\w"))
    format = rng.choice(
        (
            f"({word}{{1,{many}}}){{1,{many}}}",
            f"(({word}{{9}}){{1,{many}}}x*){{1,9}}",
            f".*{word}.{{{min(many, 400)}}}",
            "|".join(f"{n:x}{word}*{n * 7919 % 65_521:x}" for n in range(many)),
            "".join(f"({word}{{0,{n}}}{n})?" for n in range(min(many, 400))),
            "(" * many + word + ")*" * many,
            f"({word}*)" * min(many, 400),
        )
    )
    return {"type": "string", "pattern": format}


def _large(rng: random.Random) -> Any:
    """Very many or very long values, names, alternatives, or counts of them."""
    many = rng.choice((30, 300, 3000, 20_000))
    few = min(many, 3000)
    names = {f"p{n}": rng.choice(({"type": "integer"}, {"enum": [n]}, {})) for n in range(few)}
    count = rng.choice((10**3, 10**5, 10**7, 2**40))
    texts = {
        "enum": lambda: {"enum": [f"{n * 7919 % 1_000_003:x}" for n in range(many)]},
        "growing": lambda: {"enum": ["a" * n for n in range(min(many, 1000))]},
        "const": lambda: {"const": rng.choice(("ab ", "\u4e00", "\\", '"')) * many},
        "nested const": lambda: {"const": json.loads("[" * (few // 10) + "]" * (few // 10))},
        "properties": lambda: {"type": "object", "properties": names},
        "required": lambda: {"type": "object", "properties": names, "required": list(names)},
        "alternatives": lambda: {
            "anyOf": [{"type": "string", "maxLength": n, "minLength": n // 2} for n in range(few)]
        },
        "objects": lambda: {
            "anyOf": [{"type": "object", "properties": {"a": {"const": n}}} for n in range(few)]
        },
        "items": lambda: {"type": "array", "items": {"type": "integer"}, "minItems": count},
        "items at most": lambda: {"type": "array", "items": {}, "maxItems": count},
        "length": lambda: {"type": "string", "minLength": count, "maxLength": count},
        "prefix": lambda: {"type": "array", "prefixItems": [{"type": "string"}] * few},
        "multiple": lambda: {"type": "integer", "multipleOf": rng.choice((7, 997, 99_991, count))},
        "multiples": lambda: {
            "allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]
        },
        "range": lambda: {"type": "number", "minimum": -1 / 3, "maximum": float("9" * 15)},
        "names": lambda: {"patternProperties": {f"^{n}.*{n}$": {} for n in range(min(many, 60))}},
    }
    return rng.choice(list(texts.values()))()


def _nested(rng: random.Random) -> Any:
    """A schema within a schema within a schema."""
    schema: Any = {"type": "string"}
    depth = rng.choice((5, 20, 60, 120))
    kinds: tuple[Callable[[Any], Any], ...] = (
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"type": "object", "properties": {"a": inner}},
        lambda inner: {"anyOf": [inner, {"type": "array", "items": inner}]},
        lambda inner: {"allOf": [inner]},
        lambda inner: {"type": "array", "items": inner, "minItems": 2, "maxItems": 9},
    )
    same = rng.choice((*kinds, None))
    for _ in range(depth if same is not kinds[2] else min(depth, 12)):
        schema = (same or rng.choice((kinds[0], kinds[1], kinds[3])))(schema)
    return schema


_EXPLODING = (_definitions, _combined_patterns, _pattern, _large, _nested)


def _schema(rng: random.Random) -> tuple[str, Any]:
    if rng.random() < 0.4:
        return "random", _any(rng, rng.choice((1, 2, 3, 4)))
    make = rng.choice(_EXPLODING)
    schema = make(rng)
    if "$defs" not in schema and rng.random() < 0.3:
        other = rng.choice(_EXPLODING[1:])(rng)
        around: tuple[Callable[[], Any], ...] = (
            lambda: {"anyOf": [schema, other]},
            lambda: {"allOf": [schema, other]},
            lambda: {"type": "object", "properties": {"a": schema}, "required": ["a"]},
            lambda: {"type": "array", "items": schema, "minItems": 1},
        )
        schema = rng.choice(around)()
    return make.__name__.lstrip("_"), schema


def make_sources(folder: Path) -> None:
    """A model whose template knows tools."""
    make_base(folder / "base", "hgrn")
    edit_json(folder / "base" / "tokenizer_config.json", chat_template=_TEMPLATE)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes a body with a schema."""
    target.mkdir()
    link_base(target, sources / "base")
    kind, schema = _schema(rng)
    if rng.random() < 0.1:
        schema = json.loads(damage_json(json.dumps([schema]).encode(), rng))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": rng.choice((1, 4, 16, 60)),
        "temperature": rng.choice((0, 1)),
        "n": rng.choice((1, 1, 1, 3)),
        "stream": rng.random() < 0.3,
    }
    param = rng.choice(("response_format", "tools"))
    if param == "tools":
        if not isinstance(schema, dict) or ("$ref" not in schema and rng.random() < 0.5):
            schema = {"properties": {"a": schema}, "required": ["a"]}
        function = {"name": "f", "parameters": schema}
        copies = rng.choice((1, 1, 1, 5))
        body["tools"] = [
            {"type": "function", "function": {**function, "name": f"f{n}"}} for n in range(copies)
        ]
        body["tool_choice"] = "required"
    else:
        format = {"name": "x", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": format}
    data = json.dumps(body)
    (target / _BODY).write_text(data)
    return f"{kind} in {param}: {data[-400:]!r}"


class _Server:
    """The server of this process: its memory once it had compiled a grammar."""

    first_bytes = 0


def _used_bytes() -> int:
    memory = resident_memory()
    return 0 if memory is None else memory.anonymous_bytes


def _slowness() -> float:
    """How many times longer than its processor time a computation takes on this busy machine."""
    begun, used = time.perf_counter(), time.process_time()
    while time.process_time() < used + 0.2:
        pass
    return max(1.0, (time.perf_counter() - begun) / 0.2)


def exercise(folder: Path, rng: random.Random) -> None:
    """Sends the body. It is answered or refused soon, and the server does not grow."""
    from mlx_mmfree.platform.confinement.policy import COMPILATION

    asked = client((folder / "base").resolve(), max_body_bytes=10**7, max_context=256)
    if not _Server.first_bytes:
        sound = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
        format = {"response_format": {"type": "json_object"}}
        if asked.post(_PATH, json=sound | format).status_code != 200:
            raise AssertionError("a sound request is refused")
        _Server.first_bytes = _used_bytes()
    body = (folder / _BODY).read_bytes()
    begun = time.perf_counter()
    answer = asked.post(_PATH, content=body, headers={"Content-Type": "application/json"})
    took = time.perf_counter() - begun
    if took > COMPILATION.seconds + 1 and took > (COMPILATION.seconds + 1) * _slowness():
        raise Late(f"it took {took:.1f} s: {answer.text:.300}")
    if (growth := _used_bytes() - _Server.first_bytes) > _GROWTH_BYTES:
        raise AssertionError(f"the server has grown by {growth / 1e6:.0f} MB")
    judge(answer)


CLASS = FuzzClass(
    make_sources,
    mutate,
    exercise,
    refusals=(Refusal,),
    # of the process that holds the vocabulary too, over all cases
    cpu_seconds=1000,
    memory_bytes=900_000_000,
    # one server for all, so that what each leaves in memory adds up
    batch=10**6,
    count=20,
    packages=("starlette", "llguidance", "uvicorn", "httpx2"),
)
