"""How the texts of a model are sampled where nobody says: as its files or its makers do."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from ..errors import shown_path
from ..files.checkpoint_files import GENERATION_FILE, GGUF_SUFFIX
from ..layers.matrix import matrices
from ..layers.ternary.values import TERNARY_BITS
from ..models import architecture_of
from ..tokenizer.sampling_defaults import read_sampling


class Suggestion(NamedTuple):
    """How a model's texts are sampled.

    Attributes:
        values: The values of `make_sampler` and `make_processors` by their names; none if nobody says.
        source: Who says so, as the first words of a sentence.
    """

    values: dict[str, float]
    source: str = ""

    def without(self, given: Collection[str]) -> dict[str, float]:
        """The values beside those that are given; of a penalty that is, none of its own."""
        left = {name: value for name, value in self.values.items() if name not in given}
        if "repetition_penalty" in given:
            left.pop("repetition_context_size", None)
        return left

    def line(self, given: Collection[str]) -> str:
        """A line that says what is taken beside the values that are given; empty if nothing is."""
        taken = self.without(given).items()
        words = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in taken)
        return f"Sampling {self.source}: {words}." if taken else ""


def suggested_sampling(model: nn.Module, folder: Path, *, thinks: bool = True) -> Suggestion:
    """How the texts of a model are sampled by its files, or else by what its makers recommend.

    Args:
        model: The model.
        folder: The folder of its small files.
        thinks: Whether its answers begin with reasoning, if it was taught that.

    Raises:
        CheckpointError: A value of `generation_config.json` has the wrong type or range.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> suggested_sampling(load(demo.path())[0], demo.path()).values
        {}
    """
    if values := read_sampling(folder):
        source = Path(shown_path(str(folder)))
        name = source.name if source.suffix == GGUF_SUFFIX else GENERATION_FILE
        return Suggestion(values, f"as {name} says")
    config: Any = model.config
    recommend = architecture_of(config).few_bit_sampling
    packed = [each for each in matrices(model).values() if each.is_packed and not each.is_ternary]
    bits = [getattr(each.layer, "bits", TERNARY_BITS) for each in packed]
    if recommend is None or min(bits, default=8) > TERNARY_BITS:
        return Suggestion({})
    is_rotated = any(each.is_rotated for each in packed)
    return Suggestion(dict(recommend(is_rotated, thinks)), "as the makers of this model recommend")
