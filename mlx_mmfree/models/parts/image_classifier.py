"""A model that sorts images into classes."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

import mlx.core as mx
import mlx.nn as nn

from ...errors import UnsupportedModelError
from ...ops.long_sums import long_sum
from ...ops.ternary import ROUNDING_VERSION
from .stage import Stage as ImageStage

Pool = Literal["mean", "first"]


class Stage(Protocol):
    """What `ImageClassifier` asks of a stage, such as a `parts.stage.Stage` or a `Stack`."""

    def transform(self, x: mx.array) -> mx.array:
        """Vectors of the same shape."""


class ImageClassifier(nn.Module):
    r"""Patches, stages of blocks, neck, one vector of each image, head.

    .. math::
        y = \mathrm{head}\big(\mathrm{pool}_p(\mathrm{neck}(x_p))\big), \quad
        x = \mathrm{stage}_n(\mathrm{merge}_n(\ldots\mathrm{stage}_1(\mathrm{embed}(\mathrm{image}))))

    Source: MetaFormer (Yu et al., arXiv 2111.11418).

    Args:
        embed: Maps images `(B, H, W, C)` to vectors of patches, a sequence `(B, N, D)` or a map
            `(B, H', W', D)`.
        stages: Map them to such of the same dims.
        head: Maps `(B, D)` to `(B, K)`, a logit for each class. A norm behind the pooling is part of it.
            Where `config` has no classes, it gives features in place of logits.
        merges: One between each stage and the next, which changes dims and places; `None` where they
            stay.
        neck: What stands between the last stage and the pooling, such as a norm; `None`: nothing.
        pool: The vector of an image is the mean of all places, or the first of a sequence, as where a
            class token stands there.
        config: The architecture's configuration, kept as the attribute `config`.

    Attributes:
        purpose: What such a model is for, in the words of an error message.
        command: The command that uses such a model.
        rounding: As of `TokenModel`.

    Shape:
        `images`: `(B, H, W, C)`; logits `(B, K)`.

    Raises:
        ValueError: There is not one merge between each two stages, or the pooling is unknown.

    Example:
        >>> embed = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), lambda x: x.flatten(1, 2))
        >>> stage = Stack([Block(32, GQA(32, is_causal=False), SwiGLU(32))], nn.RMSNorm(32))
        >>> model = ImageClassifier(embed, [stage], nn.Linear(32, 10))
        >>> model(mx.zeros((1, 16, 16, 3))).shape
        (1, 10)
    """

    purpose = "sorting images into classes"
    command = "classify"

    def __init__(
        self,
        embed: nn.Module,
        stages: Sequence[Stage],
        head: nn.Module,
        *,
        merges: Sequence[nn.Module | None] | None = None,
        neck: nn.Module | None = None,
        pool: Pool = "mean",
        config: Any = None,
    ):
        super().__init__()
        merges = [None] * (len(stages) - 1) if merges is None else merges
        if len(merges) != len(stages) - 1:
            raise ValueError(
                "[ImageClassifier] 'merges' must have one entry between each two stages but has "
                f"{len(merges)} for {len(stages)} stages."
            )
        if pool not in get_args(Pool):
            known = ", ".join(map(repr, get_args(Pool)))
            raise ValueError(
                f"[ImageClassifier] 'pool' must be one of {known} but got {pool!r:.80}."
            )
        self.embed = embed
        self.stages = list(stages)
        self.merges = [nn.Identity() if merge is None else merge for merge in merges]
        self.neck = nn.Identity() if neck is None else neck
        self.head = head
        self.config = config
        self.rounding: int | str | None = ROUNDING_VERSION
        self._pool = pool

    def features(self, images: mx.array) -> mx.array:
        """The vectors that are pooled, `(B, N, D)` or `(B, H', W', D)`."""
        y: mx.array = self.neck(self.stages[-1].transform(self._entering_last_stage(images)))
        return y

    def until_last_block(self, images: mx.array) -> mx.array:
        """The vectors that enter the last block of the last stage.

        Raises:
            ValueError: Its blocks are those of a model of texts, which are not called one by one.
        """
        return self._last_stage.until_last(self._entering_last_stage(images))

    def from_last_block(self, x: mx.array) -> mx.array:
        """The logits that follow from `until_last_block`; raises as that does."""
        return self.logits(self.neck(self._last_stage.from_last(x)))

    def logits(self, features: mx.array) -> mx.array:
        """The logits `(B, K)` that follow from `features`."""
        y: mx.array = self.head(self._pooled(features))
        return y

    @property
    def num_logits(self) -> int:
        """Classes `K`."""
        return int(self.config.num_classes)

    @property
    def dims(self) -> int:
        """Dims of the vector of an image."""
        return int(self.config.num_features)

    def check_classes(self, name: str) -> None:
        """Refuses a model without classes.

        Args:
            name: What needs them, for the message.

        Raises:
            UnsupportedModelError: There are none.
        """
        if getattr(self.config, "num_classes", None) == 0:
            raise UnsupportedModelError(
                f"[{name}] the model must have classes but its 'num_classes' is 0. Train a head on it "
                "first, with 'new_head' of 'mmfree train'."
            )

    def predictions(self, images: mx.array) -> mx.array:
        return self(images)

    def __call__(self, images: mx.array) -> mx.array:
        return self.logits(self.features(images))

    def _entering_last_stage(self, images: mx.array) -> mx.array:
        x = self.embed(images)
        for stage, merge in zip(self.stages, self.merges, strict=False):
            x = merge(stage.transform(x))
        return x

    @property
    def _last_stage(self) -> ImageStage:
        stage = self.stages[-1]
        if not isinstance(stage, ImageStage):
            raise ValueError(
                "[ImageClassifier] the last of 'stages' must be a 'Stage' of blocks of images but is a "
                f"{type(stage).__name__}."
            )
        return stage

    def _pooled(self, x: mx.array) -> mx.array:
        """The vector of each image, `(B, D)`."""
        if self._pool == "first":
            return x[:, 0]
        places = x.reshape(x.shape[0], -1, x.shape[-1])
        return (long_sum(places, axis=-2) / places.shape[1]).astype(x.dtype)
