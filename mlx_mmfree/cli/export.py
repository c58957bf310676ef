"""`mmfree export`: writes one step of decoding as a file that MLX runs without this library."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .parts.command import command
from .parts.flags import add_output_flag, add_overwrite_flag, positive
from .parts.loading import add_memory_flags, add_model_flags, loaded
from .parts.parser import CommandParser
from .parts.terminal import size_text

if TYPE_CHECKING:
    from ..generation.export import Export

HELP = "write one step of decoding, for programs in C++ or Swift"

_CONTEXT = 2048

_FORMAT = """\
The folder gets step.mlxfn, which MLX's import_function reads in C++, Swift, C and Python; step.json
with the names, shapes and dtypes of all that goes in and comes out; and the tokenizer's files. What was
written is imported and run before the folder appears under its name. The function runs on the kind of
device that it was exported on. It holds the Metal kernels of this library where they run. Its C++
kernels for CPUs are left out, because MLX writes its own operations only: on a CPU a ternary product is
MLX's quantized_matmul with 2 bits, which takes many times as long."""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mmfree export",
        description=__doc__,
        usual="--model --adapter-path --output --weights --context --overwrite",
        epilog=_FORMAT,
    )
    add_model_flags(parser)
    group = parser.add_argument_group("result")
    add_output_flag(group, default="step")
    group.add_argument(
        "--weights",
        choices=("inside", "beside"),
        default="inside",
        help="where the weights lie: inside step.mlxfn, or in weights.safetensors, which is passed to "
        "each step (%(default)s)",
    )
    group.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="number of tokens that attention has space for, at least; each step takes as long as if "
        f"all were in use ({_CONTEXT})",
    )
    group.add_argument(
        "--plain",
        action="store_true",
        help="leave out the Metal kernels of this library, and use operations of MLX alone",
    )
    add_overwrite_flag(group)
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from ..files.reading import expanded, real_path
    from ..generation.export import export_step
    from ..hub.checkpoint.save import check_target

    read = [expanded(args.model)] if args.model else []
    check_target(real_path(args.output), args.overwrite, "export", read)
    context = args.context or _CONTEXT
    with loaded(args, batch_size=1, prefill_step_size=1, context_length=context) as (
        model,
        tokenizer,
    ):
        done = export_step(
            args.output,
            model,
            tokenizer,
            context=context,
            weights_beside=args.weights == "beside",
            plain=args.plain,
            overwrite=args.overwrite,
        )
    if args.context is not None and done.capacity is None:
        print(
            "note: the state of the model has a constant size. These flags have no effect: --context.",
            file=sys.stderr,
        )
    print(_report(args.output, done))
    return 0


def _report(path: str, done: "Export") -> str:
    prompt, tokens = done.example
    near = done.agreement
    capacity = "any number of tokens" if done.capacity is None else f"{done.capacity:,} tokens"
    kernels = (
        "MLX's own, without kernels of this library. A ternary product is quantized_matmul with 2 bits."
        if done.is_plain
        else "MLX's own and Metal kernels of this library, as source text."
    )
    same = "the same tokens" if near.same_tokens else "another token at least once"
    return "\n".join(
        [
            f"Wrote {path}: "
            + ", ".join(f"{name} ({size_text(size)})" for name, size in done.sizes.items()),
            f"Operations: {kernels}",
            f"Capacity: {capacity}",
            f"Checked: imported and run, it gives the logits that it was exported with, to the last "
            f"bit. After {' '.join(map(str, prompt))} it chooses {' '.join(map(str, tokens))}. The "
            f"model as it runs here chooses {same}, and its logits differ by at most "
            f"{near.difference:.2g} of the largest.",
        ]
    )
