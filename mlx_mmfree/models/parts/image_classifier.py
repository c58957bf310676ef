"""A model that sorts images into classes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...ops.long_sums import long_sum
from ...ops.ternary import ROUNDING_VERSION
from .stack import Stack


class ImageClassifier(nn.Module):
    r"""Patches, stages of blocks, the mean over all places, head.

    .. math::
        y = W\,\mathrm{mean}_p(x_p), \quad
        x = \mathrm{stage}_n(\mathrm{merge}_n(\dots\mathrm{stage}_1(\mathrm{embed}(\mathrm{image}))))

    Args:
        embed: Maps images `(B, H, W, C)` to vectors of patches, a sequence `(B, N, D)` or a map
            `(B, H', W', D)`.
        stages: Map them to such of the same dims, each by a method `transform` as that of `Stack`.
        head: Maps `(B, D)` to `(B, K)`, a logit for each class.
        merges: One between each stage and the next, which changes dims and places; `None` where they
            stay.
        config: The architecture's configuration, kept as the attribute `config`.

    Attributes:
        purpose: What such a model is for, in the words of an error message.
        rounding: As of `TokenModel`.

    Shape:
        `images`: `(B, H, W, C)`; logits `(B, K)`.

    Raises:
        ValueError: There is not one merge between each two stages.
    """

    purpose = "sorting images into classes"

    def __init__(
        self,
        embed: nn.Module,
        stages: Sequence[Stack],
        head: nn.Module,
        *,
        merges: Sequence[nn.Module | None] | None = None,
        config: Any = None,
    ):
        super().__init__()
        merges = [None] * (len(stages) - 1) if merges is None else merges
        if len(merges) != len(stages) - 1:
            raise ValueError(
                "[ImageClassifier] 'merges' must have one entry between each two stages but has "
                f"{len(merges)} for {len(stages)} stages."
            )
        self.embed = embed
        self.stages = list(stages)
        self.merges = [nn.Identity() if merge is None else merge for merge in merges]
        self.head = head
        self.config = config
        self.rounding: int | str | None = ROUNDING_VERSION

    def features(self, images: mx.array) -> mx.array:
        """The vectors behind the last stage, `(B, N, D)` or `(B, H', W', D)`."""
        x = self.embed(images)
        for merge, stage in zip([nn.Identity(), *self.merges], self.stages, strict=True):
            x = stage.transform(merge(x))
        return x

    def predictions(self, images: mx.array) -> mx.array:
        return self(images)

    def __call__(self, images: mx.array) -> mx.array:
        x = self.features(images)
        places = x.reshape(x.shape[0], -1, x.shape[-1]).swapaxes(1, 2)
        mean = long_sum(places, axis=-1) / places.shape[2]
        y: mx.array = self.head(mean.astype(x.dtype))
        return y
