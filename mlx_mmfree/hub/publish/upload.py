"""Uploads a model folder to the Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...errors import UploadError
from ..remote.download import one_line
from ..remote.patience import patiently
from .model_card import CARD_FILE
from .upload_plan import UploadPlan, check_repository

if TYPE_CHECKING:
    from huggingface_hub import HfApi

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
            place,
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
        raise UploadError(
            f"[upload] {place} was refused: {one_line(error)}. Correct that and try again."
        ) from error
    except (OSError, errors.HTTPError, RuntimeError) as error:
        # the client wraps the error of one of several files
        reason = one_line(error.__cause__ or error)
        raise UploadError(
            f"[upload] {place} was not written: {reason}. Check the network; a new start sends only "
            "what the Hub does not have yet."
        ) from error


def _reason(error: Exception) -> str:
    """The reason that the Hub gives, without what the client adds."""
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
