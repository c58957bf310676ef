"""Digests of data and weights. They tell a resumed run whether these are still the same."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import TrainingError
from ..files.reading import open_file
from ..layers.matrix import parameters
from .samples import Samples


def file_digest(path: Path) -> str:
    """The digest of a file's content."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_digest(path: Path) -> str:
    """The digest of the content of a file of texts.

    Raises:
        TrainingError: The file cannot be read.
    """
    try:
        return file_digest(path)
    except OSError as error:
        raise TrainingError(f"[data] '{path}' must be a readable text file: {error}.") from error


def samples_digest(data: Mapping[str, Samples[Any]]) -> str:
    """The digest of the training and validation samples."""
    digest = hashlib.sha256()
    for name in ("train", "valid"):
        for part in data[name].content() if name in data else ():
            digest.update(part)
        digest.update(b"|")
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """The digest of the names, shapes and dtypes of a model's tensors and of 64 numbers of each."""
    digest = hashlib.sha256()
    for name, array in parameters(model).items():
        digest.update(f"{name} {array.shape} {array.dtype} ".encode())
        digest.update(np.array(array.reshape(-1)[:64].astype(mx.float32)).tobytes())
    return digest.hexdigest()
