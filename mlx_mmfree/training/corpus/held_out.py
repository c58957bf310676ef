"""Chooses the documents that a model is measured on and never trained on."""

import hashlib


def is_held_out(document: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out part.

    A hash of its text alone decides. So a document stays on its side whatever stands before it, in
    however many files, and copies of it stay together. A larger fraction only adds documents.

    Args:
        document: The text.
        fraction: About what part of all documents is held out.
    """
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
