"""Odd values and damage that several classes use."""

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**32 - 1,
    2**70,
    1e300,
    "",
    "a",
    "\0",
    "(((",
    "(a*)*b",
    "{{ 1 // 0 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    [],
    {},
    [[]],
    {"type": "Metaspace"},
    "Sequence",
    "\U0001f600",
)
# progress bars clear no screen, name no window, set no colour and never go back
TERMINAL_CONTROLS = ("\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x08", "\x7f")
CONTROLS = "".join(TERMINAL_CONTROLS) + "\u202e\u2028\r"
TEXTS = (
    *("", " ", "\n", "\0", "a", "Hello w\u00f6rld", "<|eot_id|>", "</s><s>", "<unk>", "\u2581"),
    *("\ufffd\ufeff", "e\u0301" * 40, "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u202eabc"),
    *(CONTROLS, "a" * 3000, " " * 3000, "\u0130\u00df\ufb03", "\u1112\u1161\u11ab", "1" * 500),
)
# numbers and structures as text in a file, some of which Python cannot write
RAW_JSON = (
    *("1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e-400", "-0.0", "9" * 5000, "1" * 400),
    *("[" * 900 + "]" * 900, "[" * 200_000, '{"a":' * 50_000, '"\\ud800"', '"\\u0000"', "0.1e1"),
    *(
        "9007199254740993",
        "18446744073709551616",
        "-9223372036854775809",
        "2024-01-01",
        "'a'",
        "01",
    ),
    *('{"a":1,"a":2}', "null", "true", '"' + "x" * 100_000 + '"', "[" + "0," * 20_000 + "0]"),
)


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cuts, inserts, repeats or overwrites some bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 40))):
        start = rng.randrange(len(changed) + 1)
        stop = min(start + rng.choice((1, 1, 4, 200)), len(changed))
        kind = rng.randrange(5)
        if kind == 0:
            changed[start:stop] = rng.randbytes(stop - start)
        elif kind == 1:
            del changed[start:stop]
        elif kind == 2:
            changed[start:start] = rng.randbytes(rng.choice((1, 4, 50)))
        elif kind == 3:
            changed[start:start] = changed[start:stop]
        elif start < len(changed):
            changed[start] = rng.randrange(32, 127)
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.1 else changed)


def damage_json(data: bytes, rng: random.Random) -> bytes:
    """Replaces, removes or renames some entries of a JSON document."""
    document = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        node, key = random_entry(document, rng)
        if key is None:
            continue
        kind = rng.random()
        if kind < 0.6:
            node[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif kind < 0.8:
            del node[key]
        elif isinstance(node, dict):
            node[rng.choice(("x", "", "type", str(key) * 2))] = node.pop(key)
    return json.dumps(document).encode()


def random_entry(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """An object or list somewhere in a document and one of its keys; None if it is empty."""
    node = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return node, None
        key = rng.choice(keys)
        if not (isinstance(node[key], dict | list) and node[key]) or rng.random() >= 0.85:
            return node, key
        node = node[key]


def with_raw_json(document: Any, rng: random.Random) -> str:
    """A document with some entries replaced by raw text of numbers or deep structures."""
    raw = {}
    for number in range(rng.choice((1, 1, 2, 4))):
        node, key = random_entry(document, rng)
        if key is not None:
            mark = f"raw-{number}-mark"
            raw[mark] = rng.choice(RAW_JSON)
            node[key] = mark
    text = json.dumps(document)
    for mark, value in raw.items():
        text = text.replace(f'"{mark}"', value)
    return text


def odd_text(rng: random.Random) -> str:
    """A text of odd chunks and random characters."""
    chunks = [rng.choice(TEXTS) for _ in range(rng.choice((1, 1, 2, 6)))]
    if rng.random() < 0.3:
        # any character may occur but surrogates
        codes = (rng.choice((rng.randrange(128), rng.randrange(0xD800))) for _ in range(30))
        chunks.append("".join(map(chr, codes)))
    return "".join(chunks)


def replace_file(file: Path, kind: str) -> None:
    """Removes a file, or replaces it by something else."""
    file.unlink(missing_ok=True)
    if kind == "empty":
        file.touch()
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "pipe":
        os.mkfifo(file)


def odd_entry(file: Path, outside: Path, rng: random.Random) -> str:
    """Replaces a file by something that is no file of the folder: a link, a pipe, a folder."""
    kind = rng.choice(("absent", "empty", "folder", "loop", "pipe", "link", "chain", "dangling"))
    replace_file(file, kind)
    if kind == "link":
        file.symlink_to(
            rng.choice((outside, os.path.relpath(outside, file.parent), Path("/dev/zero")))
        )
    elif kind == "chain":
        step = file.with_name(f"step-{file.name}")
        step.symlink_to(outside)
        file.symlink_to(step.name)
    elif kind == "dangling":
        file.symlink_to(outside.parent / "absent")
    return f"{file.name}: {kind}"
