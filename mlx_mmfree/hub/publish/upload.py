"""Uploads a model folder to the Hub; what would be sent is known before anything is."""

import fnmatch
import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...errors import UploadError
from ...files.checkpoint_files import CONFIG_FILE
from ...files.json_file import read_json_object
from ...files.opening import open_member
from ...files.paths import real_path
from ..checkpoint.checkpoint import read_tensor_entries
from ..remote.download import REPOSITORY_NAME, check_login, one_line
from ..remote.patience import patiently
from .model_card import CARD_FILE, ModelCard, model_card, read_source_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_MESSAGE = "Upload model with mlx_mmfree"

_GGUF_MAGIC = b"GGUF"
_LEFT_OUT = (
    ".*",
    "*~",
    "*.tmp",
    "*.temp",
    "*.part",
    "*.partial",
    "*.incomplete",
    "*.lock",
    "*.log",
)
_PULL_REQUESTS = "refs/"


@dataclass(frozen=True)
class UploadPlan:
    """What an upload sends and where to.

    Attributes:
        folder: The model folder.
        repository: The repository `owner/name`.
        files: Bytes of each file by its name.
        left_out: Entries of the folder that are not sent: folders, hidden and temporary files.
        is_private: Whether only its owner may see the repository.
        revision: The branch; `None` is the main one.
        message: The commit message.
        card: The model card that is sent unless the Hub has one; `None` if the folder has one.
    """

    folder: Path
    repository: str
    files: dict[str, int]
    left_out: tuple[str, ...]
    is_private: bool
    revision: str | None
    message: str
    card: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def check_repository(repository: str) -> None:
    """Checks what can be known without a network, for a long conversion to fail before it starts.

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
            f"[upload] 'repository' must be a valid id but got {repository!r}: {one_line(error)}."
        ) from error
    token = get_token()
    if token is None:
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
) -> UploadPlan:
    """Checks a folder and lists what an upload would send; the network is not used.

    Only the files of the folder itself are sent. Folders in it, hidden and temporary files are left
    out. A folder without a model card gets one on the Hub, unless the repository has one.

    Args:
        path: A folder with a model: `config.json` and weights, or a GGUF file.
        repository: The repository id `owner/name`.
        private: Make a new repository private.
        revision: The branch to write to; a missing one is made. `None` is the main one.
        message: The commit message.

    Raises:
        CheckpointError: The folder's configuration or weights are damaged.
        UploadError: The folder is not a model, or has a file that must not be sent.
    """
    _check_name(repository)
    if revision == "" or message == "":
        name = "revision" if revision == "" else "message"
        raise UploadError(f"[upload] '{name}' must not be empty. Leave it out instead.")
    folder = real_path(path)
    if not folder.is_dir():
        raise UploadError(f"[upload] 'path' must be a model folder but '{path}' is not a folder.")
    files: dict[str, int] = {}
    left_out = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() or any(fnmatch.fnmatch(entry.name, pattern) for pattern in _LEFT_OUT):
            left_out.append(f"{entry.name}/" if entry.is_dir() else entry.name)
        else:
            files[entry.name] = _file_bytes(entry)
    _check_model(folder, files)
    return UploadPlan(
        folder,
        repository,
        files,
        tuple(left_out),
        private,
        revision,
        message or DEFAULT_MESSAGE,
        None if CARD_FILE in files else _card(folder, repository, files),
    )


def upload(plan: UploadPlan) -> str:
    """Sends a model folder to the Hub, making the repository and the branch if needed.

    Files that the Hub already has are not sent again, so a run after an interruption goes on where
    the first one stopped. Progress is shown by huggingface_hub, whose login is used as well.

    Args:
        plan: What `plan_upload` returned.

    Returns:
        The address of the repository at the revision.

    Raises:
        UploadError: The Hub refuses, or cannot be reached.

    Example:
        >>> upload(plan_upload("my-model", "me/my-model"))  # doctest: +SKIP
    """
    # Slow to import, and planning does without.
    from huggingface_hub import CommitOperationAdd, HfApi

    check_repository(plan.repository)
    api = HfApi(library_name="mlx_mmfree")
    place = f"[upload] '{plan.repository}'"
    with _hub_errors(plan):
        page = patiently(
            lambda: api.create_repo(
                plan.repository, private=plan.is_private or None, exist_ok=True
            ),
            place,
        )
        if plan.is_private and not api.repo_info(plan.repository).private:
            raise UploadError(
                f"[upload] 'private' must be left out for '{plan.repository}', which exists and is "
                "public. Make it private in its settings first, or choose another name."
            )
        if plan.revision is not None and not plan.revision.startswith(_PULL_REQUESTS):
            branch = plan.revision
            patiently(
                lambda: api.create_branch(plan.repository, branch=branch, exist_ok=True), place
            )
        contents: dict[str, str | bytes] = {name: str(plan.folder / name) for name in plan.files}
        if plan.card is not None and not _has_card(api, plan):
            contents[CARD_FILE] = plan.card.encode()
        # what was sent before a try failed is not sent again
        patiently(
            lambda: api.create_commit(
                plan.repository,
                [CommitOperationAdd(name, content) for name, content in contents.items()],
                commit_message=plan.message,
                revision=plan.revision,
            ),
            place,
        )
    return f"{page}/tree/{plan.revision}" if plan.revision else str(page)


def _check_name(repository: str) -> None:
    if not REPOSITORY_NAME.fullmatch(repository):
        raise UploadError(
            f"[upload] 'repository' must be a Hub repository 'owner/name' but got {repository!r}."
        )


def _file_bytes(file: Path) -> int:
    try:
        with open_member(file) as stream:
            return os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise UploadError(
            f"[upload] '{file}' cannot be sent: {error}. Remove it from the folder, or mend it."
        ) from error


def _check_model(folder: Path, files: dict[str, int]) -> None:
    """Refuses what is not a model; headers of its weights are read."""
    quantized = [name for name in files if name.endswith(".gguf")]
    for name in quantized:
        with open_member(folder / name) as stream:
            if stream.read(4) != _GGUF_MAGIC:
                raise UploadError(f"[upload] '{folder / name}' must be a GGUF file but is none.")
    if CONFIG_FILE in files:
        read_json_object(folder / CONFIG_FILE)
        if not quantized or any(name.endswith((".safetensors", ".bin")) for name in files):
            read_tensor_entries(folder)
    elif not quantized:
        raise UploadError(
            f"[upload] 'path' must be a model folder but '{folder}' has neither {CONFIG_FILE} nor a "
            "GGUF file. Give the folder that convert or train wrote."
        )


def _card(folder: Path, repository: str, files: Collection[str]) -> str:
    """The text of a model card that says what the folder itself says."""
    if CONFIG_FILE not in files:
        form: Literal["mlx", "hf", "gguf"] = "gguf"
    else:
        form = "mlx" if "quantization" in read_json_object(folder / CONFIG_FILE) else "hf"
    command = shlex.join(["mmfree", "upload", "--path", folder.name, "--repo", repository])
    return model_card(
        ModelCard(
            name=repository,
            format=form,
            command=command,
            relation=None,
            source=read_source_card(folder),
        )
    )


def _has_card(api: "HfApi", plan: UploadPlan) -> bool:
    return patiently(
        lambda: api.file_exists(plan.repository, CARD_FILE, revision=plan.revision),
        f"[upload] '{plan.repository}'",
    )


@contextmanager
def _hub_errors(plan: UploadPlan) -> Iterator[None]:
    from huggingface_hub import errors

    place = f"'{plan.repository}'" + (f" at '{plan.revision}'" if plan.revision else "")
    try:
        yield
    except errors.HfHubHTTPError as error:
        raise UploadError(f"[upload] {place} {_refusal(error)}") from error
    except errors.OfflineModeIsEnabled as error:
        raise UploadError(
            f"[upload] {place} cannot be reached while HF_HUB_OFFLINE forbids it. Unset it."
        ) from error
    except ValueError as error:
        raise UploadError(f"[upload] {place} was refused: {one_line(error)}.") from error
    except (OSError, errors.HTTPError, RuntimeError) as error:
        # the client wraps what happened to one of several files
        reason = one_line(error.__cause__ or error)
        raise UploadError(
            f"[upload] {place} was not written: {reason}. Check the network; a new start sends only "
            "what the Hub does not have yet."
        ) from error


def _reason(error: Exception) -> str:
    """What the Hub says, without what the client adds."""
    said = getattr(error, "server_message", None) or "the login may not write there"
    return one_line(ValueError(said))


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
