"""Uploads a model folder to the Hub. What would be sent is planned and checked without the network."""

import fnmatch
import os
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import UploadError
from ...files.checkpoint_files import ADAPTER_CONFIG_FILE, CONFIG_FILE, GGUF_SUFFIX, TEMPLATE_FILE
from ...files.gguf_file import MAGIC
from ...files.reading import open_file, read_file, read_json_object, real_path, tokenizer_files
from ..adapters.adapter_folder import holds_adapter
from ..checkpoint.checkpoint import open_checkpoint, read_tensor_entries
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.save import CHECKPOINT_FILES
from ..remote.cache_content import patiently
from ..remote.download import REPOSITORY_NAME, check_login, one_line
from .adapter_files import adapter_files
from .model_card import (
    CARD_FILE,
    MAX_CARD_BYTES,
    ModelCard,
    model_card,
    pipeline_of,
    read_source_card,
    storage_of,
    with_name,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_MESSAGE = "Upload model with mlx_mmfree"

_SENT = (
    *CHECKPOINT_FILES,
    *(
        "*config*.json",
        "tokenizer*.json",
        "vocab*.json",
        "*.index.json",
        "*.jinja",
        "*.model",
        "*.spm",
        "*.tiktoken",
    ),
    *("*.py", "*.md", "*.txt", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp"),
)
"""The files of a model and of its card. What training leaves beside them is not for the Hub."""


@dataclass(frozen=True)
class UploadPlan:
    """The files of an upload, and where it sends them.

    Attributes:
        folder: The model folder.
        repository: The repository `owner/name`.
        files: The number of bytes of each file by its name.
        left_out: The entries of the folder that are not sent: folders, hidden files, and files that are
            not of a model, as an optimizer's state.
        is_private: Whether a new repository is private.
        revision: The branch; `None` is the main one.
        message: The commit message.
        card: The model card to send: the folder's, with commands that name the repository, or a
            new one for a repository that has none. `None` sends the folder's as it is.
        adapter_config: The text of an adapter's configuration, without local paths; `None`: the folder
            holds a model.
    """

    folder: Path
    repository: str
    files: dict[str, int]
    left_out: tuple[str, ...]
    is_private: bool
    revision: str | None
    message: str
    card: str | None = None
    adapter_config: str | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of all files."""
        return sum(self.files.values())


def check_repository(repository: str) -> None:
    """Checks the repository and the login without the network, before a long conversion starts.

    Args:
        repository: The repository id `owner/name`.

    Raises:
        UploadError: The id is not valid, or nobody is logged in.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    _check_name(repository)
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UploadError(
            f"[upload] 'repository' must be a valid id but got {repository!r}: {one_line(error)}. "
            "Choose another name."
        ) from error
    if get_token() is None:
        raise UploadError(
            f"[upload] '{repository}' can be written only by someone who is logged in. Run `hf auth "
            "login`, or set HF_TOKEN to a token that may write."
        )
    check_login("upload", UploadError)


def plan_upload(
    path: str | os.PathLike[str],
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    certify: Callable[[Path], str] | None = None,
    base_model: str | None = None,
) -> UploadPlan:
    """Checks a folder and lists what an upload would send, without the network.

    Of the folder of an adapter or of its run, the adapter alone is sent: its tensors, its configuration
    without local paths, and a card that names the base model and its licence, which is read from the
    base model's card.

    Of another folder itself only the files of a model and of its card are sent, and with them its named
    chat templates. A folder without a model card gets one on the Hub, unless the repository has one. In
    a card that this library wrote, the commands name the repository instead of the folder.

    Args:
        path: A folder with a model: `config.json` and weights, or a GGUF file; or one with an adapter.
        repository: The repository id `owner/name`.
        private: Make a new repository private.
        revision: The branch to write to, which is made if it is missing. `None` is the main one.
        message: The commit message.
        certify: As of `ModelCard`, for the card of a folder that has none.
        base_model: The repository of the model that an adapter was trained on. It must be given where
            the adapter names a local folder.

    Raises:
        CheckpointError: The folder's configuration or weights are damaged.
        UploadError: The folder does not hold a model, or holds a file that must not be sent.
    """
    _check_name(repository)
    if revision == "" or message == "":
        name = "revision" if revision == "" else "message"
        raise UploadError(f"[upload] '{name}' must not be empty. Leave it out instead.")
    folder = real_path(path)
    if not folder.is_dir():
        raise UploadError(
            f"[upload] 'path' must be a model folder but '{path}' is not a folder. Give the folder that "
            "convert or train wrote."
        )
    if holds_adapter(folder) and not (folder / CONFIG_FILE).exists():
        found = adapter_files(folder, repository, base_model)
        sent = {
            ADAPTER_CONFIG_FILE: len(found.config.encode()),
            CARD_FILE: len(found.card.encode()),
        }
        for name in (found.weights, TEMPLATE_FILE):
            if name == found.weights or (folder / name).exists():
                sent[name] = _file_bytes(folder / name)
        others = (e for e in sorted(folder.iterdir()) if e.name not in sent)
        return UploadPlan(
            folder,
            repository,
            sent,
            tuple(f"{entry.name}/" if entry.is_dir() else entry.name for entry in others),
            private,
            revision,
            message or DEFAULT_MESSAGE,
            found.card,
            found.config,
        )
    if base_model is not None:
        raise UploadError(
            f"[upload] 'base_model' must be left out for '{path}', which holds no adapter, but got "
            f"{base_model!r:.100}. Leave it out."
        )
    files: dict[str, int] = {}
    left_out = []
    templates = tokenizer_files(folder)
    for entry in sorted(folder.iterdir()):
        in_folder = {name: file for name, file in templates.items() if entry in file.parents}
        if in_folder:
            files |= {name: _file_bytes(file) for name, file in in_folder.items()}
        elif entry.is_dir() or not _is_sent(entry.name):
            left_out.append(f"{entry.name}/" if entry.is_dir() else entry.name)
        else:
            files[entry.name] = _file_bytes(entry)
    _check_model(folder, files)
    if CARD_FILE in files:
        card = _named_card(folder / CARD_FILE, repository)
        if card is not None:
            files[CARD_FILE] = len(card.encode())
    else:
        card = _card(folder, repository, files, certify)
    return UploadPlan(
        folder,
        repository,
        files,
        tuple(left_out),
        private,
        revision,
        message or DEFAULT_MESSAGE,
        card,
    )


def _check_name(repository: str) -> None:
    if not REPOSITORY_NAME.fullmatch(repository):
        raise UploadError(
            f"[upload] 'repository' must be a Hub repository 'owner/name' but got {repository!r}. Check "
            "the spelling."
        )


def _is_sent(name: str) -> bool:
    patterns = (fnmatch.fnmatchcase(name, pattern) for pattern in _SENT)
    return not name.startswith(".") and any(patterns)


def _named_card(file: Path, repository: str) -> str | None:
    """A card whose commands name the repository; `None` if they do so already, or name nothing."""
    try:
        text = read_file(file, MAX_CARD_BYTES, is_member=True).decode()
    except (OSError, UnicodeDecodeError):
        return None
    named = with_name(text, repository)
    return None if named == text else named


def _file_bytes(file: Path) -> int:
    try:
        with open_file(file, is_member=True) as stream:
            return os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise UploadError(
            f"[upload] '{file}' cannot be sent: {error}. Remove it from the folder, or mend it."
        ) from error


def _check_model(folder: Path, files: dict[str, int]) -> None:
    """Refuses a folder that does not hold a model. The headers of its weights are read."""
    quantized = [name for name in files if name.endswith(GGUF_SUFFIX)]
    for name in quantized:
        with open_file(folder / name, is_member=True) as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise UploadError(
                    f"[upload] '{folder / name}' must be a GGUF file but is not. Convert the model "
                    "again, or remove the file."
                )
    if CONFIG_FILE in files:
        read_json_object(folder / CONFIG_FILE)
        if not quantized or any(name.endswith((".safetensors", ".bin")) for name in files):
            read_tensor_entries(folder)
    elif not quantized:
        raise UploadError(
            f"[upload] 'path' must be a model folder but '{folder}' has neither {CONFIG_FILE} nor a "
            "GGUF file. Give the folder that convert or train wrote."
        )


def _card(
    folder: Path,
    repository: str,
    files: Collection[str],
    certify: Callable[[Path], str] | None,
) -> str:
    """The text of a model card, made of what the folder itself says."""
    if CONFIG_FILE not in files:
        format: Literal["mlx", "hf", "gguf"] = "gguf"
    else:
        format = "mlx" if "quantization" in read_json_object(folder / CONFIG_FILE) else "hf"
    checkpoint = open_checkpoint(folder)
    reader = ParameterReader(checkpoint)
    words = ["mmfree", "upload", "--model", folder.name, "--upload-repo", repository]
    return model_card(
        ModelCard(
            name=repository,
            format=format,
            command=shlex.join(words),
            relation="adapter" if checkpoint.keeps_adapter else None,
            source=read_source_card(folder),
            pipeline=pipeline_of(folder),
            storage=storage_of(folder),
            is_ternary=reader.holds_ternary,
            tags=reader.tags,
        ),
        "" if certify is None else certify(folder),
    )


_PULL_REQUESTS = "refs/"


def upload(plan: UploadPlan) -> str:
    """Uploads a model folder to the Hub. The repository and the branch are made if needed.

    All files appear on the Hub at once. Files that the Hub already has are not sent again, so that a run
    after an interruption goes on where the first one stopped. The package `huggingface_hub` shows the
    progress and has the login.

    Args:
        plan: The result of `plan_upload`.

    Returns:
        The address of the repository at the revision.

    Raises:
        UploadError: The Hub refuses, or cannot be reached.

    Example:
        >>> upload(plan_upload("my-model", "me/my-model"))  # doctest: +SKIP
    """
    # slow to import
    from huggingface_hub import CommitOperationAdd, HfApi

    check_repository(plan.repository)
    api = HfApi(library_name="mlx_mmfree")
    target = f"[upload] '{plan.repository}'"
    with _hub_errors(plan):
        page = patiently(
            lambda: api.create_repo(
                plan.repository, private=plan.is_private or None, exist_ok=True
            ),
            target,
        )
        if plan.is_private and not api.repo_info(plan.repository).private:
            raise UploadError(
                f"[upload] 'private' must be left out for '{plan.repository}', which exists and is "
                "public. Make it private in its settings first, or choose another name."
            )
        if plan.revision is not None and not plan.revision.startswith(_PULL_REQUESTS):
            branch = plan.revision
            patiently(
                lambda: api.create_branch(plan.repository, branch=branch, exist_ok=True), target
            )
        contents: dict[str, str | bytes] = {name: str(plan.folder / name) for name in plan.files}
        if plan.adapter_config is not None:
            contents[ADAPTER_CONFIG_FILE] = plan.adapter_config.encode()
        if plan.card is not None and (CARD_FILE in plan.files or not _has_card(api, plan)):
            contents[CARD_FILE] = plan.card.encode()
        # files that an earlier try has sent are not sent again
        patiently(
            lambda: api.create_commit(
                plan.repository,
                [CommitOperationAdd(name, content) for name, content in contents.items()],
                commit_message=plan.message,
                revision=plan.revision,
            ),
            target,
        )
    return f"{page}/tree/{plan.revision}" if plan.revision else str(page)


def _has_card(api: "HfApi", plan: UploadPlan) -> bool:
    return patiently(
        lambda: api.file_exists(plan.repository, CARD_FILE, revision=plan.revision),
        f"[upload] '{plan.repository}'",
    )


@contextmanager
def _hub_errors(plan: UploadPlan) -> Iterator[None]:
    from huggingface_hub import errors

    target = f"'{plan.repository}'" + (f" at '{plan.revision}'" if plan.revision else "")
    try:
        yield
    except errors.HfHubHTTPError as error:
        raise UploadError(f"[upload] {target} {_refusal(error)}") from error
    except errors.OfflineModeIsEnabled as error:
        raise UploadError(
            f"[upload] {target} cannot be reached while HF_HUB_OFFLINE forbids it. Unset it."
        ) from error
    except ValueError as error:
        raise UploadError(
            f"[upload] {target} was refused: {one_line(error)}. Correct that and try again."
        ) from error
    except (OSError, errors.HTTPError, RuntimeError) as error:
        # the client wraps the error of one of several files
        reason = one_line(error.__cause__ or error)
        raise UploadError(
            f"[upload] {target} was not written: {reason}. Check the network; a new start sends only "
            "what the Hub does not have yet."
        ) from error


def _reason(error: Exception) -> str:
    """The reason that the Hub gives, without what the client adds."""
    message = getattr(error, "server_message", None) or "the login may not write there"
    return one_line(ValueError(message))


def _refusal(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return (
            "was refused: the Hub does not accept the login. Run `hf auth login`, or set HF_TOKEN "
            "to a valid token."
        )
    if status == 403:
        return (
            f"was refused: {_reason(error)}. The login must have the right to write there: use a token "
            "with that right, and a namespace of yours."
        )
    if status == 404:
        return "was not found on the Hub. Check the spelling of repository and revision."
    return f"was not written: {one_line(error)}. Try again later."
