"""`mmfree classify`: prints the classes of texts or images with their probabilities."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files.reading import read_text
from .parts import loading
from .parts.command import command
from .parts.flags import add_json_flag, add_plugin_flag, positive
from .parts.parser import CommandParser
from .parts.picture_flag import add_picture_flag, check_picture
from .parts.prompts import add_texts, given_texts, opened_as, texts_bar
from .parts.terminal import aligned, share_bar

if TYPE_CHECKING:
    from ..generation.predictions import Classes
    from ..hub.checkpoint.load import OpenedModel
    from ..images import ImageProcessor


HELP = "sort texts or images into classes"


def build_parser() -> argparse.ArgumentParser:
    usual = "--model --adapter-path --text --data --labels --picture --top-k --batch-size --json"
    parser = CommandParser(prog="mmfree classify", description=__doc__, usual=usual)
    loading.add_source_flags(
        parser, ", such as timm/edgenext_xx_small.in1k or one of 'mmfree train'", required=True
    )
    add_plugin_flag(parser)
    loading.add_adapter_flag(parser)
    add_images(parser)
    add_texts(parser, "to classify", is_required=False)
    parser.add_argument(
        "--top-k", type=positive, default=5, help="number of classes for each input (%(default)s)"
    )
    add_json_flag(parser)
    loading.add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    has_texts = args.text is not None or args.data is not None
    if has_texts == bool(args.images):
        raise UsageError(
            "[classify] the input must be files of images, --text or --data but got "
            f"{'both' if has_texts else 'none of them'}. See 'mmfree classify --help'."
        )
    texts = given_texts(args) if has_texts else []
    check_map(args)

    kinds = ("text-classification", "image-classification")
    opened = opened_as(kinds, args, "classify", "sort texts or images into classes")
    planned: Any = opened.model
    if (planned.pipeline == kinds[1]) == has_texts:
        raise UsageError(
            f"[classify] the input must be {'images' if has_texts else 'texts'} but '{args.model}' is a "
            f"model for {planned.purpose}."
        )
    with loading.limited_memory(args, opened.nbytes):
        found = _text_classes(args, opened, texts) if has_texts else image_classes(args, opened)
    kind, inputs = ("text", texts) if has_texts else ("image", [str(file) for file in args.images])
    if args.json:
        listed = [
            {
                kind: text,
                "classes": [
                    {"label": label, "probability": probability}
                    for label, probability in zip(each.labels, each.probabilities, strict=True)
                ],
            }
            for text, each in zip(inputs, found, strict=True)
        ]
        print(json.dumps({f"{kind}s": listed}, ensure_ascii=False))
        return 0
    # a name of a file says which, a text is too long
    names = [str(number) for number in range(1, len(found) + 1)] if has_texts else inputs
    _print_table(kind, names, found)
    return 0


def _text_classes(
    args: argparse.Namespace, opened: "OpenedModel", texts: Sequence[str]
) -> "list[Classes]":
    from ..generation.predictions import classify

    tokenizer = opened.processor()
    model = loading.with_adapter(args, opened)
    with texts_bar(len(texts)) as progress:
        return classify(model, tokenizer, texts, top_k=args.top_k, progress=progress)


def _print_table(kind: str, names: Sequence[str], found: "Sequence[Classes]") -> None:
    rows = [(kind, "class", "probability")]
    bars = [""]
    for name, each in zip(names, found, strict=True):
        for label, probability in zip(each.labels, each.probabilities, strict=True):
            rows.append((name, " ".join(label.split()), f"{probability:.3f}"))
            bars.append(share_bar(probability))
    for line, bar in zip(aligned(rows, left=2), bars, strict=True):
        print(f"{line}  {bar}".rstrip())


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
    add_picture_flag(group, what="draw where the likeliest class is seen")
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
    if args.picture is None:
        return
    if not 1 <= len(args.images) <= _MOST_DRAWN:
        raise UsageError(
            f"[classify] 'picture' must be left out without images and with more than {_MOST_DRAWN} of "
            f"them but there are {len(args.images)}."
        )
    check_picture("classify", args.picture)


def image_classes(args: argparse.Namespace, opened: "OpenedModel") -> "list[Classes]":
    """The classes of the images, whose maps are drawn if asked for."""
    from ..generation.predictions import classify_images

    labels = [] if args.labels is None else _read_labels(args.labels)
    processor = opened.processor()
    model = loading.with_adapter(args, opened)
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
        if args.picture is not None:
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
    from ..evaluation.maps import class_maps, draw_class_maps

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
    draw_class_maps(views, maps, titles, args.picture.expanduser())
