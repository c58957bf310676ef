"""Loads models, tokenizers and image processors from a folder or from the Hub."""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...files.checkpoint_files import TOKENIZER_PATTERNS, TRANSLATION_FILES, VOCABULARY_FILES
from ...models import Decoder
from ...tokenizer.tokenizer import Tokenizer
from ...tokenizer.translation_tokenizer import TranslationTokenizer
from ..remote.download import gguf_file, local_folder
from .checkpoint import Checkpoint, open_checkpoint
from .opened_model import OpenedModel, Source, open_model


def load(
    path_or_repo: Source,
    revision: str | None = None,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    latent: bool | None = None,
    rebuild_masters: bool = False,
    direct: bool = False,
) -> tuple[Any, Any]:
    """Loads a model and what prepares its inputs: a tokenizer, or for images an image processor.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, a file
            `owner/name/file.gguf` in one, or an opened checkpoint.
        revision: Branch, tag or commit of the repository.
        dtype: The float dtype of weights and activations; `None` keeps that of the checkpoint. Ternary
            weights do not depend on it.
        packed: Pack ternary matrices to 2 bits a weight, for inference. `False` keeps the float master
            weights, for training.
        latent: Whether float weights of a ternary Llama are masters to be ternarised (`True`) or are
            meant as stored (`False`). `None` reads it from the configuration and the revision. An opened
            checkpoint knows it.
        rebuild_masters: With `packed=False`, make up masters if the checkpoint is packed without them.
            The model computes the same, but what its weights were before rounding is lost.
        direct: Changes nothing: five trits a byte, which it once let stay so where products were faster,
            are always unpacked to 2 bits. Calls that name it go on working.

    Returns:
        The model and the `Tokenizer`; for a Marian model its `TranslationTokenizer`, and for one of
        images the `ImageProcessor`.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent.
        DownloadError: The Hub does not hand out the repository.
        UnsupportedModelError: The architecture is not implemented.

    Example:
        >>> from mlx_mmfree import demo
        >>> model, tokenizer = load(demo.path())  # or load("ridger/MMfreeLM-370M")
        >>> logits, state = model(mx.array([tokenizer.encode("Hello")]))
        >>> logits.shape
        (1, 3, 2048)
    """
    opened = open_model(path_or_repo, revision, dtype, packed, latent, rebuild_masters)
    processor = opened.processor()
    return opened.load(), processor


def load_model(
    path_or_repo: Source,
    revision: str | None = None,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    latent: bool | None = None,
    rebuild_masters: bool = False,
    direct: bool = False,
) -> Decoder:
    """Loads a model without a tokenizer.

    Args:
        path_or_repo, revision, dtype, packed, latent, rebuild_masters, direct: As for `load`.

    Returns:
        The model.

    Raises:
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.

    Example:
        >>> from mlx_mmfree import demo
        >>> load_model(demo.path(), dtype=mx.float32).dims
        384
    """
    return open_model(path_or_repo, revision, dtype, packed, latent, rebuild_masters).load()


def load_tokenizer(path_or_repo: str | os.PathLike[str], revision: str | None = None) -> Any:
    """Loads a tokenizer without its model. Of a repository, only the small files are downloaded.

    Args:
        path_or_repo: A folder, a `.gguf` file, a repository `owner/name` of the Hub, or a file
            `owner/name/file.gguf` in one.
        revision: Branch, tag or commit of the repository.

    Returns:
        The `Tokenizer`, or the `TranslationTokenizer` of a Marian model.

    Raises:
        CheckpointError: A file is missing or damaged.
        DownloadError: The Hub does not hand out the repository.

    Example:
        >>> from mlx_mmfree import demo
        >>> load_tokenizer(demo.path()).vocab_size
        2048
    """
    folder = _tokenizer_folder(path_or_repo, revision)
    if not _has_vocabulary(folder) and (folder / TRANSLATION_FILES[0]).exists():
        return TranslationTokenizer(folder)
    return Tokenizer.from_folder(folder)


def load_text_tokenizer(
    path_or_repo: str | os.PathLike[str], revision: str | None = None
) -> Tokenizer:
    """As `load_tokenizer`, but refuses a tokenizer of two languages."""
    return Tokenizer.from_folder(_tokenizer_folder(path_or_repo, revision))


def _tokenizer_folder(path_or_repo: str | os.PathLike[str], revision: str | None) -> Path:
    folder = local_folder(path_or_repo, revision, patterns=TOKENIZER_PATTERNS)
    if not _has_vocabulary(folder) and gguf_file(folder, path_or_repo, revision) is not None:
        return open_checkpoint(path_or_repo, revision).folder
    return folder


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).exists() for name in VOCABULARY_FILES)


def needed_bytes(
    checkpoint: Checkpoint,
    dtype: mx.Dtype | None = None,
    packed: bool = True,
    rebuild_masters: bool = False,
) -> int:
    """Computes what weights take once they are loaded, from the headers alone.

    Dense weights whose values turn out to be ternary take less.

    Args:
        checkpoint: The checkpoint.
        dtype, packed, rebuild_masters: As for `load`.

    Returns:
        The number of bytes.

    Example:
        >>> from mlx_mmfree import demo
        >>> checkpoint = open_checkpoint(demo.path())
        >>> needed_bytes(checkpoint) < needed_bytes(checkpoint, packed=False, rebuild_masters=True)
        True
    """
    return OpenedModel(checkpoint, dtype, packed, rebuild_masters).nbytes
