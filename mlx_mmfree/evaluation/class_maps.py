"""Where in an image a model sees a class."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..models import ImageClassifier


def class_maps(
    model: ImageClassifier, images: mx.array, classes: Sequence[int] | None = None
) -> np.ndarray:
    r"""Maps of a class by Grad-CAM (Selvaraju et al., arXiv 1610.02391).

    .. math::
        M_p = \mathrm{ReLU}\Big(\sum_k \alpha_k A_{pk}\Big), \quad
        \alpha_k = \frac{1}{N} \sum_p \frac{\partial y_c}{\partial A_{pk}}

    with the logit :math:`y_c` of the class and, as :math:`A`, the vectors of all places that enter the
    model's last block. There, unlike behind it, the places of a model with a class token still act on
    the logits; so the maps of all models mean the same.

    Args:
        model: In evaluation.
        images: What the model reads, `(B, H, W, C)`.
        classes: A class for each image; `None`: the likeliest one.

    Returns:
        float32 `(B, H', W')` from 0 to 1, each map over its largest value; 0 throughout where no place
        speaks for the class.

    Raises:
        ValueError: The model keeps its places in a sequence and does not tell its rows and columns, or
            there is not one class for each image.
    """
    entering: list[mx.array] = []

    def noted(x: mx.array) -> mx.array:
        entering.append(x)
        return x

    logits = _with_last_block(model, images, noted)
    wanted = mx.argmax(logits, axis=-1) if classes is None else mx.array(list(classes))
    if wanted.shape != logits.shape[:1]:
        raise ValueError(
            f"[class_maps] 'classes' must be one for each of {len(images)} images but got {classes}."
        )

    def score(x: mx.array) -> mx.array:
        logits = _with_last_block(model, images, lambda _: x)
        return mx.take_along_axis(logits.astype(mx.float32), wanted[:, None], axis=-1).sum()

    [x] = entering
    gradient = _places(model, mx.grad(score)(x)).astype(mx.float32)
    weights = gradient.mean(axis=(1, 2), keepdims=True)
    maps = np.array(mx.maximum((weights * _places(model, x)).sum(axis=-1), 0.0))
    return maps / np.maximum(maps.max(axis=(1, 2), keepdims=True), np.finfo(np.float32).tiny)


def _with_last_block(
    model: ImageClassifier, images: mx.array, replace: Callable[[mx.array], mx.array]
) -> mx.array:
    """The logits with something else in place of what enters the last block."""
    blocks = model.stages[-1].blocks
    last = blocks[-1]
    blocks[-1] = _Watched(last, replace)
    try:
        return model(images)
    finally:
        blocks[-1] = last


class _Watched:
    """A block that gets something else; whatever else it is asked, it is the block.

    Args:
        block: The block.
        replace: Gives what it gets for what comes in.
    """

    def __init__(self, block: Any, replace: Callable[[mx.array], mx.array]):
        self._block = block
        self._replace = replace

    def __call__(self, x: mx.array, *rest: object, **options: object) -> object:
        return self._block(self._replace(x), *rest, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def _places(model: ImageClassifier, x: mx.array) -> mx.array:
    """Vectors of places as a map `(B, H', W', D)`, without tokens that stand before them."""
    if x.ndim == 4:
        return x
    grid = getattr(model.embed, "grid", None)
    if grid is None:
        raise ValueError(
            "[class_maps] 'model' must keep its places in rows and columns, or tell their number by "
            f"'grid' of its embedding, but {type(model.embed).__name__} does not."
        )
    rows, columns = grid
    return x[:, x.shape[1] - rows * columns :].reshape(x.shape[0], rows, columns, x.shape[2])
