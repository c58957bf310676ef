"""The weights of a model that is loaded when it is asked for, and leaves when others need its memory."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from ...generation.memory import MemoryNeed, joint_bytes
from ..errors import RequestError
from ..settings import ServedModel

_log = logging.getLogger(__name__)


class Weights:
    """The weights that a model shares with its adapters, in memory or not.

    Args:
        models: The model and its adapters, as requests are checked against them. Where `load` is given,
            they need no weights.
        load: Loads them all, in this order; `None`: they are loaded and stay.
        need: What they take, by the memory plan.

    Attributes:
        models, need: As above.
        is_loaded: Whether they are in memory.
        last_use: Greater than for all weights that were used before.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        load: Callable[[], Sequence[ServedModel]] | None = None,
        need: MemoryNeed | None = None,
    ):
        self.models = list(models)
        self.need = need
        self._load = load
        self._loaded = list(models) if load is None else []
        self.is_loaded = load is None
        self.last_use = 0.0

    def loaded(self, name: str) -> ServedModel:
        """The model of a name, ready to compute; it is loaded if it must be.

        Raises:
            RequestError: It cannot be loaded.
        """
        if not self.is_loaded and self._load is not None:
            self._loaded = self._read(self._load)
            self.is_loaded = True
        pairs = zip(self.models, self._loaded, strict=True)
        known, found = next(pair for pair in pairs if pair[0].name == name)
        # the tokenizer is always there
        return replace(found, tokenizer=known.tokenizer)

    def _read(self, load: Callable[[], Sequence[ServedModel]]) -> list[ServedModel]:
        name, begun = self.models[0].name, time.perf_counter()
        try:
            loaded = list(load())
        except Exception as error:
            # its words may name files of this machine
            _log.exception("The model %s cannot be loaded.", name)
            raise RequestError(
                f"[server] the model {name!r:.100} must be loaded but cannot be. The server's log has "
                "more.",
                500,
                code="model_error",
            ) from error
        _log.info("Loaded %s in %.1f s.", name, time.perf_counter() - begun)
        return loaded

    def let_go(self) -> None:
        """Frees the memory, once nobody else holds a model."""
        self._loaded, self.is_loaded = [], False
        # what the modules of a model hold of each other
        gc.collect()
        mx.clear_cache()
        _log.info("%s has left memory.", self.models[0].name)


def leaving(
    wanted: Weights,
    others: Sequence[Weights],
    budget_bytes: int | None,
    is_busy: Callable[[Weights], bool],
) -> list[Weights] | None:
    """The models that must leave before weights can be loaded, the least recently used first.

    Weights that are too large for the plan alone are loaded alone.

    Args:
        wanted: Those to be loaded.
        others: All others.
        budget_bytes: What those in memory may take together; `None`: any number.
        is_busy: Whether weights are under way, and so must stay.

    Returns:
        `None` if there is no space before some that are under way come to rest.
    """

    def fit() -> bool:
        needs = [each.need for each in (*staying, wanted) if each.need is not None]
        return budget_bytes is None or joint_bytes(needs) <= budget_bytes

    staying = [each for each in others if each.is_loaded or is_busy(each)]
    gone: list[Weights] = []
    for each in sorted(staying, key=lambda each: each.last_use):
        if fit():
            break
        if not is_busy(each):
            staying.remove(each)
            gone.append(each)
    return gone if not staying or fit() else None
