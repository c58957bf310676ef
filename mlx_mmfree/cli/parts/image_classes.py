"""What `mmfree classify` does with images: their flags, their classes and the picture of maps."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...files.reading import read_text
from .flags import positive
from .loading import with_adapter
from .show_attention import require_matplotlib
from .whole_texts import texts_bar
from .writable import check_writable

if TYPE_CHECKING:
    from ...generation.predictions import Classes
    from ...hub.checkpoint.load import OpenedModel
    from ...images import ImageProcessor

_MAX_BYTES = 16_000_000
_MOST_DRAWN = 60


def add_images(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for images."""
    group = parser.add_argument_group("images", "need Pillow: the extra 'vision'")
    group.add_argument(
        "images",
        nargs="*",
        type=Path,
        metavar="IMAGE",
        help="JPEG, PNG, WebP, GIF or BMP files to classify",
    )
    group.add_argument(
        "--labels",
        type=Path,
        metavar="FILE",
        help="text file with the name of a class on each line, in place of the checkpoint's names",
    )
    group.add_argument(
        "--map",
        type=Path,
        metavar="FILE",
        help="PNG file for a picture of where the likeliest class is seen; needs matplotlib",
    )
    group.add_argument(
        "--batch-size",
        type=positive,
        default=8,
        help="number of images that are computed at once (%(default)s)",
    )


def check_map(args: argparse.Namespace) -> None:
    """Refuses a picture that cannot be drawn, before any work.

    Raises:
        UsageError: matplotlib is missing, the file cannot be written, or images are none or too many.
    """
    if args.map is None:
        return
    if not 1 <= len(args.images) <= _MOST_DRAWN:
        raise UsageError(
            f"[classify] 'map' must be left out without images and with more than {_MOST_DRAWN} of them "
            f"but there are {len(args.images)}."
        )
    require_matplotlib("map", "classify")
    check_writable("[classify] 'map'", args.map)


def image_classes(args: argparse.Namespace, opened: "OpenedModel") -> "list[Classes]":
    """The classes of the images, whose maps are drawn if asked for."""
    from ...generation.predictions import classify_images

    labels = [] if args.labels is None else _read_labels(args.labels)
    processor = opened.image_processor()
    model = with_adapter(args, opened)
    with texts_bar(len(args.images), "image") as progress:
        found = classify_images(
            model,
            processor,
            args.images,
            labels=labels,
            top_k=args.top_k,
            batch_size=args.batch_size,
            progress=progress,
        )
        if args.map is not None:
            _draw_maps(args, model, processor, found)
    return found


def _read_labels(file: Path) -> list[str]:
    try:
        text = read_text(file, _MAX_BYTES)
    except OSError as error:
        raise UsageError(
            f"[classify] 'labels' must be a UTF-8 text file but '{file}' cannot be read: {error}."
        ) from error
    return text.splitlines()


def _draw_maps(
    args: argparse.Namespace,
    model: Any,
    processor: "ImageProcessor",
    found: "Sequence[Classes]",
) -> None:
    from ...evaluation.class_maps import class_maps
    from ...evaluation.class_picture import draw_class_maps

    views = [processor.view(file) for file in args.images]
    maps = [
        values
        for start in range(0, len(views), args.batch_size)
        for values in class_maps(model, processor(views[start : start + args.batch_size]))
    ]
    titles = [
        f"{file.name}: {each.labels[0]} ({each.probabilities[0]:.2f})"
        for file, each in zip(args.images, found, strict=True)
    ]
    draw_class_maps(views, maps, titles, args.map.expanduser())
