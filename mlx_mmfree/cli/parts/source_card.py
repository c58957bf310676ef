"""The source in the model card of a written model, and the certificate that goes with it."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import BackendError, UnsupportedModelError
from ...files.reading import expanded

if TYPE_CHECKING:
    from ...hub.publish.model_card import ModelCard


def certificate_section(folder: Path) -> str:
    """The certificate of the model in a folder, in Markdown, from its headers alone.

    Nothing for a model that does not decode texts.
    """
    from ...evaluation.audit import certify
    from ...evaluation.audit.section import section
    from ...hub.adapters.adapter import attach
    from ...hub.checkpoint.checkpoint import open_checkpoint
    from ...hub.checkpoint.load import OpenedModel

    try:
        opened = OpenedModel(open_checkpoint(folder))
        return section(certify(attach(opened.without_values(), opened.adapter())))
    except UnsupportedModelError:
        return ""
    except BackendError as error:
        print(
            f"note: the model card does not say what a token takes, which could not be counted: {error}",
            file=sys.stderr,
        )
        return ""


def model_card(
    name: str, arguments: Sequence[str], model: str, revision: str | None, folder: Path
) -> "ModelCard":
    """The card of a model that a command makes of another one.

    Args:
        name: The command.
        arguments: The arguments of the command.
        model: Folder or Hub repository of the source.
        revision: Branch, tag or commit of the repository.
        folder: The folder that holds the source on this machine.
    """
    from ...hub.publish.model_card import CARD_FILE, CARD_PATTERNS, ModelCard, read_source_card
    from ...hub.remote.source import find_source

    repository = find_source(model, revision).repository or None
    if repository is not None:
        # the card is at the top of the repository, whatever is read of it
        folder = find_source(repository, revision).fetch(CARD_PATTERNS)
    source = read_source_card(folder)
    if source.problem is not None:
        print(
            f"note: '{folder / CARD_FILE}' cannot be read in full: {' '.join(source.problem.split())}. "
            "Add its licence, languages and datasets to the new card by hand.",
            file=sys.stderr,
        )
    return ModelCard(
        name=folder.name,
        format="mlx",
        command=shlex.join(["mmfree", name, *map(_public, arguments)]),
        base_model=repository,
        base_revision=revision,
        source=source,
        certify=certificate_section,
    )


def _public(argument: str) -> str:
    """An argument without the folders of an absolute path: a card is public, local folders are not."""
    flag, equals, value = (
        argument.partition("=") if argument.startswith("--") else ("", "", argument)
    )
    path = expanded(value)
    return f"{flag}{equals}{path.name if path.is_absolute() else value}"
