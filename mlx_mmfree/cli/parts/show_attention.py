"""Draws the weights by which layers and heads mix a text.

Softmax attention shows its weights; recurrences and linear attention show the weights of their unrolled
format.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...errors import UsageError
from . import loading
from .command import argument_errors
from .flags import number_list, positive
from .picture_flag import add_picture_flag, check_picture
from .prompts import given_prompt

if TYPE_CHECKING:
    from ...evaluation.maps import LayerMaps
    from ...hub.checkpoint.load import OpenedModel
    from ...tokenizer.tokenizer import Tokenizer
    from ...tokenizer.translation_tokenizer import PairTokenizer

_MOST_LAYERS, _MOST_HEADS, _TOKENS = 6, 8, 64
_MOST_TOKENS = 256
"""Labels of more cannot be read, and weights of channels take their square times the channels."""

Labels = dict[str, list[str]]


USUAL = "--model --prompt --target --layers --heads --max-tokens --picture"


def add_flags(parser: argparse.ArgumentParser) -> None:
    loading.add_model_flags(parser, takes_adapter=False)
    parser.add_argument(
        "--prompt", required=True, help="text that is read; '-' reads standard input"
    )
    parser.add_argument(
        "--target",
        help="with an encoder-decoder: the text that its decoder reads beside the prompt",
    )
    parser.add_argument(
        "--layers",
        type=number_list,
        metavar="NUMBERS",
        help=f"layers to draw from 0 on, such as 0,4-6; default: the first {_MOST_LAYERS}",
    )
    parser.add_argument(
        "--heads",
        type=number_list,
        metavar="NUMBERS",
        help=f"heads to draw from 0 on, such as 0,2-3; default: the first {_MOST_HEADS}",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=_TOKENS,
        help=f"number of first tokens of the prompt that are read and drawn, at most {_MOST_TOKENS} "
        "(%(default)s)",
    )
    add_picture_flag(parser, default=Path("attention.png"))
    loading.add_memory_flags(parser)


def show_attention(args: argparse.Namespace) -> None:
    """Draws the weights, as the flags ask."""
    if args.max_tokens > _MOST_TOKENS:
        raise UsageError(
            f"[show] 'max_tokens' must be at most {_MOST_TOKENS} but got {args.max_tokens}."
        )
    text = given_prompt(args.prompt)
    check_picture("show", args.picture)
    from ...evaluation.maps import draw_maps
    from ...hub.checkpoint.load import OpenedModel

    opened = OpenedModel(loading.checkpoint_of(args), loading.dtype_of(args))
    planned = opened.model
    if planned.pipeline == "image-classification":
        raise UsageError(
            f"[show] 'model' must read texts but '{loading.model_name(args)}' is a "
            f"{type(planned).__name__}."
        )
    depth = len(planned.blocks)
    layers = sorted(args.layers or range(min(depth, _MOST_LAYERS)))
    if layers[-1] >= depth:
        raise UsageError(
            f"[show] 'layers' must be numbers from 0 to {depth - 1} for this model but got {layers[-1]}."
        )
    heads = args.heads or set(range(_MOST_HEADS))
    with loading.limited_memory(args, opened.nbytes), argument_errors():
        maps, labels = _maps(args, opened, text, layers, heads)
    for layer in maps:
        if not layer.panels:
            print(
                f"{layer.name}: {layer.reason or f'has {layer.heads} heads, none of them chosen.'}"
            )
    drawn = [layer for layer in maps if layer.panels]
    if not drawn:
        raise UsageError(
            "[show] 'layers' and 'heads' must name some that have weights to be drawn but none has."
        )
    draw_maps(
        drawn,
        labels,
        f"Weights of {loading.model_name(args)}: rows read from columns",
        args.picture,
    )
    _report(args, drawn, depth)


def _maps(
    args: argparse.Namespace,
    opened: "OpenedModel",
    text: str,
    layers: Sequence[int],
    heads: set[int],
) -> tuple[list["LayerMaps"], Labels]:
    """The maps, and the labels of the tokens of each text."""
    from ...evaluation.maps import pair_maps, text_maps
    from ...models import EncoderDecoder

    if opened.model.pipeline != "translation":
        if args.target is not None:
            raise UsageError(
                "[show] 'target' must be left out for a model that reads one text but was given."
            )
        tokenizer = opened.processor()
        tokens = _first(args, tokenizer.encode(text), "prompt")
        maps = text_maps(opened.load(), tokens, layers, heads)
        return maps, {"text": _labels(tokenizer, tokens)}
    pair = opened.translation_tokenizer()
    source = _first(args, pair.encode(text), "prompt")
    model = cast(EncoderDecoder, opened.load())
    target: list[int] = []
    if args.target is not None:
        written = pair.encode_target(args.target)
        target = _first(args, [model.start_token_id, *written[:-1]], "target")
    maps = pair_maps(model, source, target, layers, heads)
    return maps, {"source": _labels(pair, source), "target": _labels(pair, target)}


def _labels(tokenizer: "Tokenizer | PairTokenizer", tokens: Sequence[int]) -> list[str]:
    from ...evaluation.maps import token_label

    words = [tokenizer.decode([each]) for each in tokens]
    # a token that is left out of texts, or bytes that alone are no character, as the files spell it
    return [
        token_label(word if word and "\ufffd" not in word else tokenizer.id_to_piece(each))
        for each, word in zip(tokens, words, strict=True)
    ]


def _first(args: argparse.Namespace, tokens: list[int], name: str) -> list[int]:
    if not tokens:
        raise UsageError(f"[show] '{name}' must hold a token at least but is empty.")
    if len(tokens) > args.max_tokens:
        print(
            f"The first {args.max_tokens} of {len(tokens)} tokens of the {name} are read; --max-tokens "
            "takes more."
        )
    return tokens[: args.max_tokens]


def _report(args: argparse.Namespace, drawn: Sequence["LayerMaps"], depth: int) -> None:
    most = max(layer.heads for layer in drawn)
    shown = max(len(layer.panels) for layer in drawn)
    lines = [f"Drawn: {len(drawn)} mixers into {args.picture}."]
    if args.layers is None and depth > _MOST_LAYERS:
        lines.append(
            f"They are of the first {_MOST_LAYERS} of {depth} layers; --layers takes others."
        )
    if args.heads is None and shown < most:
        lines.append(f"They have the first {shown} of {most} heads; --heads takes others.")
    print("\n".join(lines))
