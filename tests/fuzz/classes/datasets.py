"""Fine-tuning samples, training texts and files of prompts."""

import codecs
import json
import lzma
import random
import shutil
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_mmfree.cli.parts.prompts import read_prompts
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.corpus.splits import find_splits
from mlx_mmfree.training.fine_tuning.preferences import read_pairs
from mlx_mmfree.training.samples import Features, read_samples
from tests.fuzz.case import OUTSIDE, FuzzClass
from tests.fuzz.hostile import ODD_VALUES, damage_bytes, odd_entry, odd_text, with_raw_json
from tests.hub.checkpoints import GOLDENS

_TOKENIZER = GOLDENS / "tokenizer_bpe"
_LINES: tuple[Any, ...] = (
    {"text": "Once upon a time"},
    {"prompt": "Hello", "completion": " world"},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
    {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "f", "parameters": {}}]},
    {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant"}]},
    {"question": "Who?", "system": "Be brief.", "chosen": "The cat.", "rejected": "The dog."},
    {"chosen": [{"role": "user", "content": "Hi"}], "rejected": {"role": "user", "content": "Ho"}},
)
_CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_FORMATS: dict[str, tuple[Any, ...]] = {
    "content": (None, 3, [{"type": "text", "text": "a"}], [{"type": "image"}], [None]),
    "tool_calls": (None, [_CALL], json.dumps([_CALL]), [{"function": "{"}], [None], "{}"),
    "reasoning": (None, "<think>", ["a"], {"a": "b"}),
    "thinking": (None, "so", 3),
    "name": (None, "Bo"),
}
_ROW_FORMATS: dict[str, tuple[Any, ...]] = {
    "tools": (None, [], "[]", '[{"name": "f", "parameters": "{}"}]', {"function": "{}"}, [["f"]]),
    "chat_template_kwargs": (None, {"a": 1}, {"messages": 3}, "{}"),
    "prompt": (None, [], [None], {"role": "user"}),
    "input": (None, "", "more", [1]),
    "system": (None, "", [3]),
}
_load = cache(Tokenizer.from_folder)


def make_sources(folder: Path) -> None:
    """A tokenizer with a chat template."""
    shutil.copytree(_TOKENIZER, folder, dirs_exist_ok=True)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes a folder of JSON, a table or a text, some of it damaged or no file."""
    target.mkdir()
    (target / "tokenizer").symlink_to(sources)
    names = ("train.jsonl",) * 4 + (
        "train.json",
        "train.csv",
        "train.tsv",
        "prompts.txt",
        "text.xz",
    )
    name = rng.choice(names)
    lines = [_line(rng) for _ in range(rng.choice((0, 1, 3, 10)))]
    if rng.random() < 0.05:
        # this is one line without an end
        lines.append('{"text": "' + "a " * rng.choice((100_000, 3_000_000)))
    data = (
        rng.choice(("\n", "\n", "\n", "\r\n", "\r", "\n\n", "\u2028"))
        .join(lines)
        .encode(errors="surrogatepass")
    )
    if name.endswith(".json") and rng.random() < 0.7:
        data = b"[" + data.replace(b"\n", b",\n") + b"]"
    elif name in ("train.csv", "train.tsv"):
        cells = data.replace(b":", b"," if name.endswith(".csv") else b"\t")
        data = b"prompt,completion\n".replace(b",", rng.choice((b",", b";", b"\t"))) + cells
    if name.endswith(".xz"):
        data = _compressed(data, rng)
    if rng.random() < 0.1:
        data = rng.choice((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) + data
    if rng.random() < 0.3:
        data = damage_bytes(data, rng)
    (target / name).write_bytes(data)
    what = f"{name}: {data[:120]!r}"
    if rng.random() < 0.1:
        what = odd_entry(target / name, target.parent / OUTSIDE / "secret.txt", rng)
    return what


def _line(rng: random.Random) -> str:
    value = json.loads(json.dumps(rng.choice(_LINES)))
    kind = rng.random()
    if kind < 0.2:
        return with_raw_json(value, rng)
    if kind < 0.35:
        lists = [v for v in value.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        of_message = bool(lists) and rng.random() < 0.6
        formats = _FORMATS if of_message else _ROW_FORMATS
        key = rng.choice(tuple(formats))
        (rng.choice(rng.choice(lists)) if of_message else value)[key] = rng.choice(formats[key])
    elif kind < 0.5:
        key = rng.choice((*value, "tools", "odd"))
        value[key] = rng.choice((*ODD_VALUES, odd_text(rng), [odd_text(rng)], "\ud800"))
    elif kind < 0.7 and "messages" in value:
        message = rng.choice(value["messages"])
        key = rng.choice(("role", "content", "tool_calls", "odd"))
        message[key] = rng.choice((*ODD_VALUES, odd_text(rng), ["a"], "\ud800"))
    elif kind < 0.8:
        return rng.choice(("", "null", "[]", '"a"', "{", "\0", "nan", "{}" * 3, "[" * 100_000))
    return json.dumps(value, ensure_ascii=rng.random() < 0.5)


def _compressed(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        # these are small to store and large to read
        data = bytes(rng.choice((10_000_000, 300_000_000)))
    return lzma.compress(data, preset=0)


def exercise(folder: Path, rng: random.Random) -> None:
    """Reads the file in the way that its name asks for."""
    tokenizer = _load((folder / "tokenizer").resolve())
    for file in chain.from_iterable(find_splits(folder).values()):
        if file.suffix == ".txt":
            # prompts, which are read below
            continue
        masks = rng.random() < 0.5
        features = rng.choice((None, None, Features(text="content", prompt="text")))
        if rng.random() < 0.3:
            read_pairs(file, tokenizer, max_length=64, features=features)
        else:
            read_samples(file, tokenizer, max_length=64, mask_prompt=masks, features=features)
        read_prompts(file)
        all(read_documents(file))
    if (folder / "prompts.txt").exists():
        read_prompts(folder / "prompts.txt")
    if (folder / "text.xz").exists():
        all(read_documents(folder / "text.xz"))


CLASS = FuzzClass(make_sources, mutate, exercise)
