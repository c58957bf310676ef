"""Damaged copies of a folder of tokenizer files, reproducible from a seed."""

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.hub.tokenizer import Tokenizer

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
MESSAGES = [
    {"role": "user", "content": "Hi <|eot_id|></s> there"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Bye"},
]


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
        node = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            deeper = isinstance(node[key], dict | list) and len(node[key]) > 0
            if deeper and rng.random() < 0.85:
                node = node[key]
                continue
            kind = rng.random()
            if kind < 0.6:
                node[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            elif kind < 0.8:
                del node[key]
            elif isinstance(node, dict):
                node[rng.choice(("x", "", "type", str(key) * 2))] = node.pop(key)
            break
    return json.dumps(document).encode()


def mutate(source: Path, target: Path, seed: int) -> str:
    """Copies the tokenizer files of ``source`` to ``target`` and damages one of them."""
    rng = random.Random(seed)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    names = sorted(
        path.name
        for path in source.iterdir()
        if path.name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    )
    for name in names:
        shutil.copyfile(source / name, target / name)
    name = rng.choice(names)
    damage = damage_json if name.endswith(".json") and rng.random() < 0.7 else damage_bytes
    (target / name).write_bytes(damage((source / name).read_bytes(), rng))
    return f"seed {seed}: {damage.__name__} of {name}"


def exercise(folder: Path, seed: int) -> bool:
    """Loads and uses a tokenizer; whether it loaded. Anything but a clean error propagates."""
    rng = random.Random(seed)
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except MMFreeError as error:
        check_message(error)
        return False
    try:
        for text in ("", " a  b\n", "<s>Hello</s> w\u00f6rld <|eot_id|> \U0001f600 12"):
            for parse_special in (None, True, False):
                tokenizer.decode(tokenizer.encode(text, parse_special=parse_special))
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(50)]
        known = [number for number in ids if has_token(tokenizer, number)]
        detokenizer = tokenizer.detokenizer()
        text = "".join(map(detokenizer.add, known)) + detokenizer.finalize()
        if text != tokenizer.decode(known):
            raise AssertionError("streaming differs from decoding")
        tokenizer.apply_chat_template(MESSAGES)
        tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    except MMFreeError as error:
        check_message(error)
    return True


def has_token(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether the vocabulary has the id."""
    try:
        tokenizer.piece(token_id)
    except ValueError:
        return False
    return True


def check_message(error: MMFreeError) -> None:
    """An error is one line that says something."""
    if "\n" in str(error).strip() or len(str(error)) < 20:
        raise AssertionError(f"unclear message {str(error)!r}")
