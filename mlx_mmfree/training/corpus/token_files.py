"""The token files of a run, made of its texts where they are missing."""

import hashlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from ...errors import TrainingError
from ...files.writing import new_file
from ...hub.checkpoint.load import load_text_tokenizer
from ...hub.remote.datasets import names_split
from ...tokenizer.documents import tokenizer_digest
from ...tokenizer.tokenizer import Tokenizer
from ..corpus import tokenize
from ..run_folder import text_digest, writing
from ..settings import Settings
from .documents import FORMATS, file_format, read_documents
from .tokenize import Header, TokenFile, write_token_file
from .vocabulary import check_vocab_size

_FOLDER = "tokens"


_AT_A_TIME = 2**22


def open_tokens(settings: Settings, folder: Path, vocab_size: int) -> dict[str, TokenFile]:
    """Opens the token files of a run by the names in its settings. Texts are tokenised first.

    The token files of texts lie in the run's folder, so that a later start finds them there.

    Args:
        settings: The run.
        folder: Folder of its tokenizer.
        vocab_size: Size of the model's vocabulary.

    Raises:
        TrainingError: A file cannot be read, does not belong to the tokenizer, or is too short.
    """
    tokenizer = load_text_tokenizer(folder)
    if settings.init_from is None:
        check_vocab_size(tokenizer.vocab_size, vocab_size)
    digest = tokenizer_digest(tokenizer)
    found = {}
    for name in settings.files:
        paths = settings.corpus(name)
        if paths[0].suffix == tokenize.SUFFIX:
            file = tokenize.open_token_file(paths[0])
        else:
            file = _of_texts(paths, settings, tokenizer, digest)
        _check_length(file.header, name, settings)
        _check(file, name, folder, digest)
        _check_ids(file, name, vocab_size)
        found[name] = file
    return found


def check_corpus(settings: Settings) -> None:
    """Refuses files of a run that are neither texts nor token files that are long enough.

    Of a token file the header is read alone.

    Raises:
        TrainingError: There is such a file.
    """
    for name in settings.files:
        path = settings.path(name)
        if not path.exists() and names_split(name):
            continue
        if path.suffix == tokenize.SUFFIX:
            _check_length(tokenize.read_token_header(path), name, settings)
        elif file_format(path.name) != FORMATS[0]:
            raise TrainingError(
                f"[train] '{path}' must be a text file or a token file. Make one of it: mmfree tokenize "
                f"--data '{path}' --output DIR"
            )


def _check_ids(file: TokenFile, name: str, vocab_size: int) -> None:
    """Refuses a file with a token that the model has no row for; a larger tokenizer may have some."""
    if file.header.vocab_size <= vocab_size:
        return
    for start in range(0, len(file.tokens), _AT_A_TIME):
        largest = int(file.tokens[start : start + _AT_A_TIME].max())
        if largest >= vocab_size:
            raise TrainingError(
                f"[train] '{name}' must hold tokens below {vocab_size}, the rows of the model's "
                f"embedding, but holds {largest}. Leave out what the tokenizer adds to the model's own "
                "tokens."
            )


def _of_texts(
    paths: Sequence[Path], settings: Settings, tokenizer: Tokenizer, digest: str
) -> TokenFile:
    run, column = settings.path(settings.output), settings.text_column
    parts = [text_digest(path) for path in paths]
    # a text has no columns
    parts += [] if file_format(paths[0].name) == FORMATS[0] else [column]
    origin = hashlib.sha256(" ".join([*parts, digest]).encode()).hexdigest()
    target = run / _FOLDER / f"{origin}{tokenize.SUFFIX}"
    try:
        return tokenize.open_token_file(target)
    except TrainingError:
        # it is missing, or was damaged since it was made
        size_bytes = sum(path.stat().st_size for path in paths)
        bar = tokenize.byte_bar(size_bytes, f"tokenizing {paths[0].name}")
    with writing(run), new_file(target) as new, bar:
        documents = chain.from_iterable(read_documents(path, column, bar.update) for path in paths)
        write_token_file(documents, new, tokenizer, source=f"'{paths[0]}'")
    return tokenize.open_token_file(target)


def _check(file: TokenFile, name: str, folder: Path, digest: str) -> None:
    if file.header.tokenizer != digest:
        raise TrainingError(
            f"[train] '{name}' must hold the ids of the run's tokenizer but was made with another one "
            f"than that in '{folder}'. Give its own as 'tokenizer', or write it again with `mmfree "
            "tokenize --model`."
        )


def _check_length(header: Header, name: str, settings: Settings) -> None:
    if header.tokens <= settings.sequence_length:
        raise TrainingError(
            f"[data] '{name}' must have more tokens than 'sequence_length', "
            f"{settings.sequence_length}, but has {header.tokens}. Lower it or give a longer text."
        )
