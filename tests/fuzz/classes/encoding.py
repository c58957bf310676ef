"""Odd texts and ids for sound tokenizers."""

import random
from functools import cache
from pathlib import Path

from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.fuzz.case import FuzzClass
from tests.fuzz.classes.tokenizer_files import make_sources
from tests.fuzz.hostile import odd_text
from tests.fuzz.tokenizing import has_token

_TEXT, _SURROGATES = "text.txt", "surrogatepass"
_load = cache(Tokenizer.from_folder)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Chooses a tokenizer and writes a text."""
    source = rng.choice(sorted(sources.iterdir()))
    target.mkdir()
    (target / "tokenizer").symlink_to(source)
    text = odd_text(rng)
    if rng.random() < 0.05:
        text += chr(rng.randrange(0xD800, 0xE000))
    (target / _TEXT).write_bytes(text.encode("utf-8", _SURROGATES))
    return f"{source.name}: {text!r:.200}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Encodes and decodes: what was plain text stays plain text, and chunks add up to the whole."""
    tokenizer = _load((folder / "tokenizer").resolve())
    text = (folder / _TEXT).read_bytes().decode("utf-8", _SURROGATES)
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    if found := set(plain) & set(tokenizer.special_tokens.values()) - {_unknown(tokenizer)}:
        raise AssertionError(f"plain text became special tokens {found}")
    is_byte_level = (folder / "tokenizer" / "tokenizer.json").exists()
    if is_byte_level and tokenizer.decode(plain) != text:
        raise AssertionError(f"decoding gives {tokenizer.decode(plain)!r:.200}")
    tokenizer.encode_continuation(text)
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages)
    if tokenizer.eos_token_ids & set(tokenizer.encode_continuation(text)):
        raise AssertionError("a message ends the text")
    ids = [*plain, *chat, *(rng.randrange(tokenizer.vocab_size) for _ in range(20))]
    rng.shuffle(ids)
    ids = [number for number in ids if has_token(tokenizer, number)]
    for skips in (False, True):
        detokenizer = tokenizer.detokenizer(skips)
        if "".join(map(detokenizer.add, ids)) + detokenizer.finalize() != tokenizer.decode(
            ids, skips
        ):
            raise AssertionError("streaming differs from decoding")


def _unknown(tokenizer: Tokenizer) -> int | None:
    return tokenizer.special_tokens.get("<unk>")


CLASS = FuzzClass(make_sources, mutate, exercise, refusals=(ValueError,), batch=200)
