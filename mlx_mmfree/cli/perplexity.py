"""`mmfree perplexity`: measures how well a model predicts a text."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from ..platform.resident_memory import BYTES_PER_GB
from .parts.command import argument_errors, command
from .parts.flags import add_json_flag, positive
from .parts.held_out_text import read_text, text_tokens
from .parts.loading import add_memory_flags, add_model_flags, loaded, model_name
from .parts.parser import CommandParser

HELP = "measure how well a model predicts a text"

_ARGUMENT = "[perplexity] 'data'"

_METHOD = """\
The text is cut into windows of --sequence-length tokens, or of as many as the model was made for if
these are fewer, and every token but the first is predicted once. A recurrent model carries its state
from window to window, so that each token is predicted from all of the text before it. A model with
attention begins each window with an empty state. Change this with --carry-state or --no-carry-state.
The text begins with the tokenizer's first token, if there is one. Without one, the first token of the
text is not predicted, and its bytes do not count. <|endoftext|> ends a document, as in the texts of
'mmfree train': it becomes the token that ends a text; its bytes and the line breaks around it do not
count. Other special tokens in the text are plain text. The standard error treats the tokens
as independent."""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree perplexity",
        description=__doc__,
        usual="--model --adapter-path --data --sequence-length --num-samples --json",
        epilog=_METHOD,
    )
    add_model_flags(parser)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data",
        "--data-path",
        required=True,
        type=Path,
        metavar="FILE",
        help="UTF-8 text file, which may be compressed with .gz or .xz",
    )
    text.add_argument(
        "--sequence-length",
        type=positive,
        default=512,
        help="number of tokens predicted in a window (%(default)s)",
    )
    text.add_argument(
        "--num-samples",
        type=_count,
        default=-1,
        help="number of windows to read from the start; -1 reads all (%(default)s)",
    )
    text.add_argument(
        "--batch-size",
        type=positive,
        default=8,
        help="number of windows read at a time where no state is carried (%(default)s)",
    )
    text.add_argument(
        "--carry-state",
        action=argparse.BooleanOptionalAction,
        help="whether a window begins with the state of the one before; default: for recurrent models",
    )
    add_json_flag(parser)
    add_memory_flags(parser)
    return parser


def _count(text: str) -> int:
    return -1 if text == "-1" else positive(text)


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    import mlx.core as mx

    from ..evaluation import is_recurrent, measure_perplexity
    from ..evaluation.perplexity import window_length
    from ..platform.progress import Progress

    text = read_text(args.data, _ARGUMENT)
    sizes = {"batch_size": args.batch_size, "prefill_step_size": args.sequence_length}
    with loaded(args, **sizes) as (model, tokenizer):
        windows, length = args.num_samples, window_length(model, args.sequence_length)
        limit = None if windows < 0 else windows * length + 1
        with argument_errors():
            tokens, size_bytes = text_tokens(tokenizer, text, model.vocab_size, _ARGUMENT, limit)
        carries_state = is_recurrent(model) if args.carry_state is None else args.carry_state
        start = perf_counter()
        with argument_errors(), Progress("Reading", len(tokens) - 1, "tok") as bar:
            result = measure_perplexity(
                model,
                tokens,
                size_bytes,
                length=length,
                batch_size=args.batch_size,
                carries_state=carries_state,
                progress=bar.update,
            )
        metrics = {
            "model": model_name(args),
            "perplexity": result.perplexity,
            "standard_error": result.standard_error,
            "bits_per_byte": result.bits_per_byte,
            "tokens": result.tokens,
            "size_bytes": result.size_bytes,
            "sequence_length": length,
            "carries_state": carries_state,
            "tokens_per_second": result.tokens / (perf_counter() - start),
            "peak_memory": mx.get_peak_memory() / BYTES_PER_GB,
        }
    print(json.dumps(metrics) if args.json else _lines(metrics))
    return 0


def _lines(metrics: dict[str, Any]) -> str:
    windows = f"windows of {metrics['sequence_length']} tokens"
    method = "carried through" if metrics["carries_state"] else "empty at the start of"
    return "\n".join(
        (
            f"Perplexity: {metrics['perplexity']:.3f} ± {metrics['standard_error']:.3f}",
            f"Bits per byte: {metrics['bits_per_byte']:.4f}",
            f"Predicted: {metrics['tokens']} tokens, {metrics['size_bytes']} bytes",
            f"State: {method} {windows}",
            f"Speed: {metrics['tokens_per_second']:.1f} tokens-per-sec",
            f"Peak memory: {metrics['peak_memory']:.3f} GB",
        )
    )
