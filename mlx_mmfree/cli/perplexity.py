"""`mmfree perplexity`: measures how well a model predicts a text."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files.opening import read_file
from .parts.console import CommandParser, argument_errors, command
from .parts.flags import positive
from .parts.loading import add_memory_flags, add_model_flags, loaded

if TYPE_CHECKING:
    import numpy as np

    from ..hub import Tokenizer

# a tokenizer may take over a hundred bytes of memory for each
_MAX_BYTES = 32_000_000

HELP = "measure how well a model predicts a text"

_METHOD = """\
The text is cut into windows of --sequence-length tokens, and every token but the first is predicted
once. A recurrent model carries its state from window to window, so that each token is predicted from
all of the text before it. A model with attention reads each window from an empty state;
--carry-state and --no-carry-state choose otherwise. The text begins with the tokenizer's first token,
if there is one; without one, the first token of the text is not predicted and its bytes do not count.
The standard error takes the tokens as independent."""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree perplexity", description=__doc__, epilog=_METHOD, allow_abbrev=False
    )
    add_model_flags(parser)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data-path",
        "--data",
        "--text-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="UTF-8 text; special tokens in it count as text",
    )
    text.add_argument(
        "--sequence-length",
        type=positive,
        default=512,
        help="tokens predicted in a window (%(default)s)",
    )
    text.add_argument(
        "--num-samples",
        type=_count,
        default=-1,
        help="windows to read, from the beginning; -1 reads all (%(default)s)",
    )
    text.add_argument(
        "--batch-size",
        type=positive,
        default=8,
        help="windows at a time where no state is carried (%(default)s)",
    )
    text.add_argument(
        "--carry-state",
        action=argparse.BooleanOptionalAction,
        help="go on from window to window; default: for recurrent models",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_memory_flags(parser)
    return parser


def _count(text: str) -> int:
    return -1 if text == "-1" else positive(text)


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    import mlx.core as mx
    from tqdm import tqdm

    from ..evaluation import is_recurrent, measure_perplexity

    text = read_text(args.data_path)
    sizes = {"batch_size": args.batch_size, "prefill_step_size": args.sequence_length}
    with loaded(args, **sizes) as (model, tokenizer):
        windows = args.num_samples
        limit = None if windows < 0 else windows * args.sequence_length + 1
        with argument_errors():
            tokens, size_bytes = text_tokens(tokenizer, text, model.vocab_size, limit)
        carries_state = is_recurrent(model) if args.carry_state is None else args.carry_state
        start = perf_counter()
        # the bar is left out where stderr is no terminal
        with tqdm(total=len(tokens) - 1, unit="tok", disable=None, file=sys.stderr) as bar:
            result = measure_perplexity(
                model,
                tokens,
                size_bytes,
                length=args.sequence_length,
                batch_size=args.batch_size,
                carries_state=carries_state,
                progress=bar.update,
            )
        figures = {
            "model": args.model or "demo",
            "perplexity": result.perplexity,
            "standard_error": result.standard_error,
            "bits_per_byte": result.bits_per_byte,
            "tokens": result.tokens,
            "size_bytes": result.size_bytes,
            "carries_state": carries_state,
            "tokens_per_second": result.tokens / (perf_counter() - start),
            "peak_memory": mx.get_peak_memory() / 1e9,
        }
    print(json.dumps(figures) if args.json else _lines(figures))
    return 0


def read_text(file: Path, flag: str = "data") -> str:
    """The text to measure on."""
    try:
        return read_file(file, _MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"[perplexity] '{flag}' must be a UTF-8 text file but '{file}' cannot be read: {error}."
        ) from error


def text_tokens(
    tokenizer: "Tokenizer", text: str, vocab_size: int, limit: int | None = None
) -> "tuple[np.ndarray, int]":
    """The ids to read, at most `limit`, and the bytes of those that are predicted."""
    import numpy as np

    from ..models.parts.tokens import check_tokens

    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    frame = tokenizer.encode("")[:1]
    begins = frame == [tokenizer.bos_token_id]
    ids = [*frame, *plain] if begins else plain
    is_whole = limit is None or limit >= len(ids)
    ids = ids[:limit]
    check_tokens(ids, vocab_size)
    if len(ids) < 2:
        raise UsageError(
            f"[perplexity] 'data' must hold at least two tokens but holds {len(plain)}. Give a "
            "longer text."
        )
    predicted = text if is_whole and begins else tokenizer.decode(ids[1:])
    return np.array(ids, np.int32), len(predicted.encode())


def _lines(figures: dict[str, Any]) -> str:
    method = "carried from window to window" if figures["carries_state"] else "empty in each window"
    return "\n".join(
        (
            f"Perplexity: {figures['perplexity']:.3f} ± {figures['standard_error']:.3f}",
            f"Bits per byte: {figures['bits_per_byte']:.4f}",
            f"Predicted: {figures['tokens']} tokens, {figures['size_bytes']} bytes",
            f"State: {method}",
            f"Speed: {figures['tokens_per_second']:.1f} tokens-per-sec",
            f"Peak memory: {figures['peak_memory']:.3f} GB",
        )
    )
