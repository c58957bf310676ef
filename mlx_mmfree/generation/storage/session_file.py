"""A file with a text and the model's state after it, whose header is compared byte by byte."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from ...files.reading import open_file
from ...files.tensors import TensorSpec, file_head
from ...models import Decoder
from ...version import __version__
from ..states import arrays_by_path, blank_state, fingerprint
from .keys import BYTES_PER_TOKEN

FORMAT_VERSION = "1"

_FORMAT, _MODEL = "mmfree_session", "mmfree_model"

_TOKENS, _STATE, _CHECKSUM = "tokens", "state.", "checksum"


class SessionContent(NamedTuple):
    """The contents of a session's file.

    Attributes:
        head: The header.
        tokens: The text, as `token_bytes` gives it.
        state_bytes: How many bytes the packed state has, which follows, and after it its SHA-256.
    """

    head: bytes
    tokens: bytes
    state_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        size = len(self.head) + len(self.tokens) + self.state_bytes
        return size + hashlib.sha256().digest_size


def identity_of(model: Decoder) -> bytes:
    """Tells models apart by all that their states depend on, the version of the library included."""
    settings = [mixer.state_kind.settings for mixer in model.token_mixers]
    described = [FORMAT_VERSION, __version__, fingerprint(model), settings]
    return hashlib.sha256(json.dumps(described).encode()).digest()


def content_of(model: Decoder, identity: bytes, tokens: bytes) -> SessionContent:
    """The required contents of a text's file."""
    length = len(tokens) // BYTES_PER_TOKEN
    arrays = arrays_by_path(blank_state(model, 1, length))
    specs = [TensorSpec(_STATE + path, each.dtype, each.shape) for path, each in arrays.items()]
    text = TensorSpec(_TOKENS, mx.int32, (length,))
    checksum = TensorSpec(_CHECKSUM, mx.uint8, (hashlib.sha256().digest_size,))
    metadata = {_FORMAT: FORMAT_VERSION, _MODEL: identity.hex()}
    head = file_head([text, *specs, checksum], metadata)
    return SessionContent(head, tokens, sum(spec.nbytes for spec in specs))


def write_content(
    file: Path, content: SessionContent, chunks: Sequence[bytes | memoryview]
) -> None:
    """Writes a session's file, with the chunks of its state.

    Raises:
        OSError: It cannot be written.
    """
    checksum = hashlib.sha256()
    with open(file, "xb") as stream:
        stream.write(content.head)
        stream.write(content.tokens)
        for chunk in chunks:
            checksum.update(chunk)
            stream.write(chunk)
        stream.write(checksum.digest())


def read_state(file: Path, content: SessionContent) -> bytes:
    """The packed state of a session's file.

    Raises:
        OSError: It is missing or cannot be read.
        ValueError: It is damaged or holds something else; the message says what.
    """
    with open_file(file, is_member=True) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size != content.nbytes:
            raise ValueError(f"has {size:,} bytes in place of {content.nbytes:,}")
        if stream.read(len(content.head)) != content.head:
            raise ValueError("belongs to another model or version")
        if stream.read(len(content.tokens)) != content.tokens:
            raise ValueError("holds another text")
        state = stream.read(content.state_bytes)
        if stream.read() != hashlib.sha256(state).digest():
            raise ValueError("has changed bytes")
    return state
