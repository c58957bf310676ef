"""Where in an image a model sees a class."""

from collections.abc import Sequence

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
        UnsupportedModelError: The model has no classes.
        ValueError: The model does not tell the rows and columns of its places, its blocks are those of a
            model of texts, or there is not one class for each image.
    """
    model.check_classes("class_maps")
    x = model.until_last_block(images)
    logits = model.from_last_block(x)
    wanted = mx.argmax(logits, axis=-1) if classes is None else mx.array(list(classes))
    if wanted.shape != logits.shape[:1]:
        raise ValueError(
            f"[class_maps] 'classes' must be one for each of {len(images)} images but got {classes}."
        )

    def score(x: mx.array) -> mx.array:
        logits = model.from_last_block(x).astype(mx.float32)
        return mx.take_along_axis(logits, wanted[:, None], axis=-1).sum()

    size = (images.shape[1], images.shape[2])
    gradient = _places(model, mx.grad(score)(x), size).astype(mx.float32)
    weights = gradient.mean(axis=(1, 2), keepdims=True)
    maps = np.array(mx.maximum((weights * _places(model, x, size)).sum(axis=-1), 0.0))
    return maps / np.maximum(maps.max(axis=(1, 2), keepdims=True), np.finfo(np.float32).tiny)


def _places(model: ImageClassifier, x: mx.array, image_size: tuple[int, int]) -> mx.array:
    """Vectors of places as a map `(B, H', W', D)`, without tokens that stand before them."""
    if x.ndim == 4:
        return x
    grid_of = getattr(model.embed, "grid_of", None)
    if grid_of is None:
        raise ValueError(
            "[class_maps] 'model' must keep its places in rows and columns, or tell their number by "
            f"'grid_of' of its embedding, but {type(model.embed).__name__} does not."
        )
    rows, columns = grid_of(image_size)
    return x[:, x.shape[1] - rows * columns :].reshape(x.shape[0], rows, columns, x.shape[2])
