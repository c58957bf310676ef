"""What a server offers: a model, and the same model with each of its adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..models import Decoder
from .errors import RequestError

if TYPE_CHECKING:
    from ..generation.sessions import Sessions


@dataclass(frozen=True)
class ServedModel:
    """A model under its name.

    Attributes:
        name: What requests call it.
        model: The model, with its adapter.
        tokenizer: Belongs to it.
        sessions: What it has read and keeps; `None` if it keeps nothing.
        draft: A smaller model that proposes tokens; `None`: there is none.
    """

    name: str
    model: Decoder
    tokenizer: Any
    sessions: "Sessions | None" = None
    draft: Decoder | None = None


class Catalogue:
    """The models of a server by name; the first one answers requests that name none.

    Args:
        models: At least one, each with a name of its own.
    """

    def __init__(self, models: Sequence[ServedModel]):
        self._models = {served.name: served for served in models}
        self._first = models[0]

    def __iter__(self) -> Any:
        return iter(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of a name.

        Raises:
            RequestError: There is none.
        """
        if name is None:
            return self._first
        found = self._models.get(name)
        if found is None:
            known = ", ".join(map(repr, self._models))
            raise RequestError(
                f"[request] 'model' must be one of {known} but got {name!r:.100}.",
                404,
                param="model",
                code="model_not_found",
            )
        return found
