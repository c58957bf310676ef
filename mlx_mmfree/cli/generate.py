"""`mmfree generate`: continues a prompt, or several, with a model."""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import CommandParser, argument_errors, command
from .flags import escaped, json_object, positive, truth
from .loading import add_memory_flags, add_model_flags, loaded
from .prompts import PromptWriter, read_prompts, read_standard_input
from .sampling import add_sampling_flags, sampler_from

if TYPE_CHECKING:
    from ..generation import BatchStats, GenerationResponse
    from ..hub import Tokenizer
    from ..models import Decoder

HELP = "continue a prompt with a model"

DEFAULT_PROMPT = "Once upon a time"
DEMO = "demo"
SEPARATOR = "=" * 10


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree generate", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    _add_prompt_flags(parser.add_argument_group("prompt"))
    choice = parser.add_argument_group("choice of tokens")
    add_sampling_flags(choice)
    _add_penalty_flags(choice)
    _add_end_flags(parser.add_argument_group("end of the text"))
    _add_output_flags(parser.add_argument_group("output"))
    add_memory_flags(parser)
    return parser


def _add_prompt_flags(group: Any) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        "-p",
        type=escaped,
        help=rf"text to continue, \n and \t count as such; '-' reads standard input; "
        f"default: {DEFAULT_PROMPT!r}",
    )
    source.add_argument(
        "--prompts-file",
        type=Path,
        help="text file with a prompt a line, or .jsonl; they are continued as a batch",
    )
    group.add_argument(
        "--batch-size", type=positive, default=32, help="prompts at a time (%(default)s)"
    )
    group.add_argument("--system-prompt", help="what a chat model is told first")
    group.add_argument("--prefill-response", default="", help="how the answer begins")
    group.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="feed the bare prompt even if the tokenizer has a chat template",
    )
    group.add_argument(
        "--chat-template-config",
        type=json_object,
        help="JSON object with further names for the chat template",
    )
    group.add_argument(
        "--prefill-step-size",
        type=positive,
        default=2048,
        help="positions of the prompt read at a time (%(default)s)",
    )


def _add_penalty_flags(group: Any) -> None:
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="factor on recent tokens; 1 = none"
    )
    group.add_argument(
        "--repetition-context-size",
        type=int,
        default=20,
        help="how many tokens are recent (%(default)s)",
    )
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, help="taken off tokens already written"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="the same, for each time"
    )


def _add_end_flags(group: Any) -> None:
    group.add_argument(
        "--max-tokens", "-m", type=positive, default=100, help="tokens at most (%(default)s)"
    )
    group.add_argument(
        "--stop",
        type=escaped,
        nargs="+",
        default=[],
        metavar="TEXT",
        help="strings that end the text and are not shown",
    )
    group.add_argument(
        "--extra-eos-token",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="tokens or ids that end the text beside the tokenizer's own",
    )


def _add_output_flags(group: Any) -> None:
    group.add_argument(
        "--verbose", type=truth, default=True, metavar="T|F", help="F prints the text alone"
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object with text and statistics"
    )


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    import mlx.core as mx

    from ..generation.stop import end_tokens

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not UTF-8 shows '?' for what it lacks.
        sys.stdout.reconfigure(errors="replace")
    with argument_errors():
        # Refuses bad values before the model is loaded.
        sampler_from(args, special_tokens=())
        options = _options(args)
    prompts = _prompts(args)
    batch_size = 1 if args.prompts_file is None else args.batch_size
    with loaded(args, batch_size=batch_size, prefill_step_size=args.prefill_step_size) as (
        model,
        tokenizer,
    ):
        with argument_errors():
            rows = _rows(args, model, tokenizer, prompts)
            end = end_tokens(tokenizer, args.extra_eos_token)
        line_break = tokenizer.encode("\n", add_special_tokens=False)
        options |= {
            "extra_eos_tokens": end,
            "sampler": sampler_from(args, special_tokens=[*line_break, *end]),
        }
        if args.seed is not None:
            mx.random.seed(args.seed)
        if args.prompts_file is None:
            _run_one(args, model, tokenizer, rows[0], options)
        else:
            _run_batch(args, model, tokenizer, rows, options)
    return 0


def _rows(
    args: argparse.Namespace, model: "Decoder", tokenizer: "Tokenizer", prompts: list[str]
) -> list[list[int]]:
    """The ids of each prompt."""
    from ..generation.text import prompt_tokens

    write = PromptWriter(
        tokenizer,
        system_prompt=args.system_prompt,
        prefill_response=args.prefill_response,
        ignore_chat_template=args.ignore_chat_template,
        variables=args.chat_template_config,
    )
    return [prompt_tokens(tokenizer, write(prompt), model.vocab_size) for prompt in prompts]


def _options(args: argparse.Namespace) -> dict[str, Any]:
    from ..generation import StopStrings, make_processors

    StopStrings(args.stop)
    return {
        "max_tokens": args.max_tokens,
        "stop": args.stop,
        "prefill_step_size": args.prefill_step_size,
        "processors": make_processors(
            repetition_penalty=args.repetition_penalty,
            repetition_context_size=args.repetition_context_size,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
        ),
    }


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts_file is not None:
        return read_prompts(args.prompts_file)
    if args.prompt is None:
        return [DEFAULT_PROMPT]
    if args.prompt == "-":
        return [read_standard_input()]
    return [args.prompt]


def _run_one(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    prompt: Sequence[int],
    options: dict[str, Any],
) -> None:
    from ..generation import stream_generate

    if args.prompt is None and args.verbose and not args.json:
        print(f"The prompt is: {DEFAULT_PROMPT}", file=sys.stderr)
    parts = []
    for response in stream_generate(model, tokenizer, prompt, **options):
        parts.append(response.text)
        if not args.json:
            print(response.text, end="", flush=True)
    if args.json:
        _print_json(args, asdict(response) | {"text": "".join(parts)})
    else:
        print()
        _print_statistics(args, response)


def _run_batch(
    args: argparse.Namespace,
    model: "Decoder",
    tokenizer: "Tokenizer",
    prompts: Sequence[Sequence[int]],
    options: dict[str, Any],
) -> None:
    from ..generation import batch_generate

    response = batch_generate(model, tokenizer, prompts, batch_size=args.batch_size, **options)
    if args.json:
        results = [
            {
                "text": text,
                "prompt_tokens": prompt_size,
                "generation_tokens": len(tokens),
                "finish_reason": reason,
            }
            for text, prompt_size, tokens, reason in zip(
                response.texts,
                response.prompt_tokens,
                response.tokens,
                response.finish_reasons,
                strict=True,
            )
        ]
        _print_json(args, {"results": results} | asdict(response.stats))
    else:
        print(f"\n{SEPARATOR}\n".join(response.texts))
        _print_statistics(args, response.stats)


def _print_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    result.pop("token", None)
    print(json.dumps({"model": args.model or DEMO} | result))


def _print_statistics(
    args: argparse.Namespace, statistics: "GenerationResponse | BatchStats"
) -> None:
    if not args.verbose:
        return
    for name, count, speed in (
        ("Prompt", statistics.prompt_tokens, statistics.prompt_tps),
        ("Generation", statistics.generation_tokens, statistics.generation_tps),
    ):
        print(f"{name}: {count} tokens, {speed:.3f} tokens-per-sec", file=sys.stderr)
    print(f"Peak memory: {statistics.peak_memory:.3f} GB", file=sys.stderr)
