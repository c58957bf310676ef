"""A digest that tells whether two tokenizers make the same ids of a text."""

import hashlib
import json

from ..files.checkpoint_files import VOCABULARY_FILES
from .tokenizer import Tokenizer
from .tokenizer_files import MAX_VOCABULARY_BYTES, read_limited


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 of the vocabulary file and the special tokens, which decide the ids of a text.

    Raises:
        CheckpointError: The vocabulary file cannot be read any more.
    """
    files = (tokenizer.folder / name for name in VOCABULARY_FILES)
    file = next((file for file in files if file.exists()), None)
    # what reads bytes has no file
    content = b"bytes" if file is None else read_limited(file, MAX_VOCABULARY_BYTES)
    digest = hashlib.sha256(content)
    digest.update(json.dumps(sorted(tokenizer.special_tokens.items())).encode())
    return digest.hexdigest()
