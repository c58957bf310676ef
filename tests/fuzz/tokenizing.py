"""Uses a tokenizer in every way there is."""

import random
from pathlib import Path

from mlx_mmfree.tokenizer.tokenizer import Tokenizer

MESSAGES = [
    {"role": "user", "content": "Hi <|eot_id|></s> there"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Bye"},
]


def use_tokenizer(folder: Path, rng: random.Random) -> None:
    """Loads a tokenizer, encodes, decodes as a whole and token by token, and writes a chat."""
    tokenizer = Tokenizer.from_folder(folder)
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


def has_token(tokenizer: Tokenizer, token_id: int) -> bool:
    """Returns whether the vocabulary has the id."""
    try:
        tokenizer.id_to_piece(token_id)
    except ValueError:
        return False
    return True
