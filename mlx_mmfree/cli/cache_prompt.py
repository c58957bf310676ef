"""`mmfree cache_prompt`: reads a prompt once and saves what the model keeps of it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from .parts.console import CommandParser, argument_errors, command
from .parts.flags import escaped, json_object, positive
from .parts.loading import (
    add_key_value_flags,
    add_memory_flags,
    add_model_flags,
    key_value_settings,
    loaded,
)
from .parts.prompts import PromptWriter, given_prompt, most_tokens
from .parts.reading_bar import ReadingBar
from .parts.writable import check_writable

HELP = "save what a model keeps of a long prompt"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree cache_prompt", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--prompt",
        "-p",
        type=escaped,
        required=True,
        help=r"text to read, \n and \t count as such; '-' reads standard input",
    )
    group.add_argument(
        "--prompt-cache-file",
        type=Path,
        required=True,
        help="file to write, for the flag of the same name of 'mmfree generate'",
    )
    group.add_argument("--system-prompt", help="what a chat model is told first")
    group.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="read the bare prompt even if the tokenizer has a chat template",
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
    add_key_value_flags(parser)
    add_memory_flags(parser)
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_writable("[cache_prompt] 'prompt_cache_file'", args.prompt_cache_file, makes_folder=True)
    import mlx.core as mx

    from ..generation import cache_prompt, keeps_key_values, save_prompt_cache
    from ..generation.text import BYTES_PER_GB, check_not_empty

    prompt = given_prompt(args.prompt)
    with argument_errors():
        check_not_empty(prompt, "cache_prompt")
    with loaded(
        args,
        batch_size=1,
        prefill_step_size=args.prefill_step_size,
        context_length=most_tokens(prompt),
    ) as (model, tokenizer):
        write = PromptWriter(
            tokenizer,
            system_prompt=args.system_prompt,
            ignore_chat_template=args.ignore_chat_template,
            variables=args.chat_template_config,
        )
        with argument_errors():
            tokens = write.opening(prompt)
        start = perf_counter()
        with argument_errors(), ReadingBar(args.prefill_step_size) as bar:
            cache = cache_prompt(
                model,
                tokens,
                prefill_step_size=args.prefill_step_size,
                prompt_progress_callback=bar,
            )
        speed = len(tokens) / (perf_counter() - start)
        settings = key_value_settings(args) if keeps_key_values(model) else None
        save_prompt_cache(args.prompt_cache_file, model, cache, settings)
        print(f"Prompt: {len(tokens)} tokens, {speed:.3f} tokens-per-sec")
        print(f"State: {_size(cache.nbytes)} in '{args.prompt_cache_file}'")
        print(f"Peak memory: {mx.get_peak_memory() / BYTES_PER_GB:.3f} GB")
    return 0


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e3:.1f} kB" if size_bytes < 1e6 else f"{size_bytes / 1e6:.1f} MB"
