"""Texts of a given number of tokens, which hardly begin alike."""

import random

from ...tokenizer.tokenizer import Tokenizer

_WORDS = ("frog", "river", "bird", "hill", "snow", "winter", "story", "apple", "music", "garden")


def prompt(tokenizer: Tokenizer, tokens: int, seed: str) -> str:
    """Random words, about so many tokens, another text for each seed."""
    text = " ".join(random.Random(seed).choices(_WORDS, k=tokens))
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:tokens])
