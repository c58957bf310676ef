"""Files of sessions: odd bytes, numbers and names. A damaged one gives a warning, and is removed."""

import hashlib
import random
import shutil
import struct
import warnings
from pathlib import Path

from mlx_mmfree import generate
from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.generation import cache_prompt
from mlx_mmfree.generation.sessions import Sessions
from tests.fuzz.base_model import BASES, base_of, link_base, make_base
from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.checkpoints import (
    damaged_weights,
    odd_file,
    odd_header,
    odd_header_length,
    truncated_weights,
)
from tests.hub.checkpoints import split_safetensors

_MEMORY = 10**6
_ODD_WORDS = (0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000, 0xFF800000, 0x7F7FFFFF)
_TEXTS = ("Once upon", "Once upon a time")


def make_sources(folder: Path) -> None:
    """Sessions of each model, two texts each."""
    for base in BASES:
        make_base(folder / base, base)
        (folder / f"{base}-case").mkdir()
        link_base(folder / f"{base}-case", folder / base)
        model, tokenizer = base_of(folder / f"{base}-case")
        with Sessions(model, memory_bytes=_MEMORY, folder=folder / f"{base}-sessions") as sessions:
            for text in _TEXTS:
                cache = cache_prompt(model, tokenizer.encode(text))
                sessions.keep(cache.tokens, cache.state)


def _session(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def odd_numbers(folder: Path, rng: random.Random) -> str:
    """Odd numbers in the tokens or the state, under a checksum that is right."""
    file = _session(folder)
    header, data = split_safetensors(file)
    start = len(file.read_bytes()) - len(data)
    tokens = header["tokens"]["data_offsets"][1]
    content = bytearray(data[: header["checksum"]["data_offsets"][0]])
    offset = 4 * rng.randrange(len(content) // 4)
    content[offset : offset + 4] = struct.pack("<I", rng.choice(_ODD_WORDS))
    checksum = hashlib.sha256(content[tokens:]).digest()
    file.write_bytes(file.read_bytes()[:start] + content + checksum)
    return f"a word at {offset} of {len(content)}"


def other_name(folder: Path, rng: random.Random) -> str:
    """Another text, number of tokens or path."""
    file = _session(folder)
    digest, _, rest = file.name.partition("-")
    length, _, suffix = rest.partition(".")
    names = (
        f"{digest}-{int(length) - 1}.{suffix}",
        f"{digest}-999999999.{suffix}",
        f"{digest}-0.{suffix}",
        f"{digest[::-1]}-{length}.{suffix}",
    )
    target = file.with_name(rng.choice(names))
    file.rename(target)
    return target.name


def other_text(folder: Path, rng: random.Random) -> str:
    """The content of the other session."""
    file = _session(folder)
    others = [each for each in folder.parent.glob("*/*.safetensors") if each != file]
    shutil.copyfile(rng.choice(others), file)
    return "copied"


_MUTATIONS = (
    *(odd_numbers, odd_numbers, other_name, other_text, odd_header, odd_header_length),
    *(damaged_weights, truncated_weights, odd_file),
)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Damages one of two sessions."""
    base = rng.choice(BASES)
    shutil.copytree(sources / f"{base}-sessions", target / "sessions")
    link_base(target, sources / base)
    mutation = rng.choice(_MUTATIONS)
    parts = sorted(file.parent for file in (target / "sessions").glob("*/*.safetensors"))
    return f"{mutation.__name__} for {base}: {mutation(rng.choice(parts), rng)}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Goes on from what is known, which is what was read, or nothing."""
    model, tokenizer = base_of(folder)
    tokens = tokenizer.encode(f"{_TEXTS[1]} there was")
    with (
        warnings.catch_warnings(record=True) as reported,
        Sessions(model, memory_bytes=_MEMORY, folder=folder / "sessions") as sessions,
    ):
        warnings.simplefilter("always")
        known = sessions.find(tokens)
        again = sessions.find(tokens)
    assert known.count == again.count
    generate(model, tokenizer, tokens[known.count :], state=known.state, max_tokens=2)
    if reported:
        (warning,) = reported
        raise warning.category(str(warning.message))


CLASS = FuzzClass(make_sources, mutate, exercise, refusals=(MMFreeError, UserWarning))
